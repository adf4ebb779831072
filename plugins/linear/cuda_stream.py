"""CUDA tactics of linear for decode batches: one wave of blocks that stream the weight."""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.linear.cuda_family import (
    BYTES_PER_US,
    LAUNCH_US,
    MIN_DOT,
    OPERANDS,
    LinearFamily,
    Tile,
    epilogue_constants,
)
from tapeout.plugins.linear.parts import LinearParts
from tapeout.plugins.triton_aot.tactic import (
    ceil_div,
    count_index,
    launch,
    power_of_two,
)

_WIDE_T = 64  # rows from which `streamed` multiplies with a warpgroup
_MOST_N, _LEAST_K, _MOST_K = 256, 64, 512  # weight rows and columns of a piece
_MOST_SUMS = 128  # a thread's


@dataclass(frozen=True)
class StreamPlan:
    """How `streamed` cuts its work.

    Attributes:
        t: most rows of a block. per_sm: blocks that fill a multiprocessor. piece_bytes: of the weight, in a
            slot of the ring. short_x: x has a ring of three slots, which leaves more for the weight, but
            then the next pieces must wait for weights asked for before them. half: blocks leave half of
            the shared memory free, so that those of the next launch can fill their rings meanwhile.
    """

    t: int
    per_sm: int
    piece_bytes: int
    splits: int = 1
    warps: int = 4
    short_x: bool = False
    half: bool = False

    @property
    def label(self) -> str:
        text = f"stream_{self.t}_{self.per_sm}x{self.piece_bytes >> 10}k" + ("_short" if self.short_x else "")
        text += "_half" if self.half else ""
        return text + (f"_split{self.splits}" if self.splits > 1 else "") + f"_w{self.warps}"


class Stream(LinearFamily):
    """`streamed`: one wave of blocks with equal shares of the weight; SM 90 and above.

    A plan says how many blocks fill a multiprocessor and how much they copy at once; what a block's
    share is, and how many pieces of it fit into shared memory, follows from the shape.
    """

    interpretable = False

    def __init__(self, op_name: str, plan: StreamPlan) -> None:
        super().__init__(
            op_name, "", Tile(n=_MOST_N, k=_LEAST_K, t=plan.t, splits=plan.splits, warps=plan.warps)
        )
        self.plan = plan
        self.name = f"triton_{plan.label}"
        self.batch_invariant = False  # another row block may add up in another order
        self.max_rows = plan.t

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        wide = self.plan.t >= _WIDE_T
        if target.sm < 90 or (wide and target.sm != 90):
            return f"SM {target.sm} has no {'warpgroup products' if wide else 'overlapping launches'}"
        if signature.inputs[0].dtype != "bfloat16":
            return "float32 products run on the ordinary units"
        parts = LinearParts.of(signature)
        if parts.k % _LEAST_K:
            return f"K = {parts.k} is no multiple of {_LEAST_K}"
        cut = self._cut(parts, self.plan.t, target)
        if cut["RING"] < 2:
            return f"has no room for two pieces of {cut['BLOCK_N']}x{cut['BLOCK_K']}"
        sums = cut["BLOCK_T"] * cut["BLOCK_N"] * (2 if parts.activation else 1)
        if sums > _MOST_SUMS * 32 * self.plan.warps:
            return f"{self.plan.warps} warps cannot hold {sums} sums"
        if self.plan.splits > 1 and ceil_div(parts.n, cut["SHARE"]) > self._shares(target):
            return f"one wave of {self.plan.splits} splits cannot hold {parts.n} outputs"
        if parts.k // cut["BLOCK_K"] < 2 * self.plan.splits:
            return f"K = {parts.k} is too small for {self.plan.splits} splits of pieces {cut['BLOCK_K']} deep"
        return super().unsupported(signature, target)

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        """The slowest block's share at its part of the bandwidth, and what reading x beside it costs."""
        parts, plan = LinearParts.of(signature), self.plan
        cut, pair = self._cut(parts, rows, target), 2 if parts.activation else 1
        wave, block_rows = plan.per_sm * target.sm_count, min(rows, cut["BLOCK_T"])
        waves = ceil_div(ceil_div(parts.n, cut["SHARE"]) * plan.splits, wave) * ceil_div(rows, cut["BLOCK_T"])
        weight_bytes = 2.0 * waves * wave * pair * cut["SHARE"] * parts.k / plan.splits
        beside = 1 + block_rows / (pair * cut["SHARE"])  # bytes read for each of the weight
        factor = max(1 + 0.07 * (beside - 1), beside / 2)
        if plan.short_x:
            factor *= 0.96 if cut["RING"] > 2 and 2 * cut["BLOCK_T"] <= pair * cut["BLOCK_N"] else 1.3
        launches = 1 + (plan.splits > 1) + self._norms_apart(parts)
        return weight_bytes / BYTES_PER_US * factor + LAUNCH_US * launches

    def _shares(self, target: CudaTarget) -> int:
        """Blocks of one split in a wave."""
        return max(1, self.plan.per_sm * target.sm_count // self.plan.splits)

    def _cut(self, parts: LinearParts, rows: int, target: CudaTarget) -> dict[str, int]:
        """How the work is cut at a bucket of `rows`."""
        plan, pair = self.plan, 2 if parts.activation else 1
        block_t, shares = self._block_rows(rows), self._shares(target)
        waves = ceil_div(pair * ceil_div(parts.n, shares), _MOST_N)
        share = ceil_div(ceil_div(parts.n, shares * waves), 4) * 4
        block_n = max(MIN_DOT, power_of_two(share))
        block_k = max(_LEAST_K, min(_MOST_K, plan.piece_bytes // (2 * pair * block_n)))
        while parts.k % block_k:
            block_k //= 2
        piece, x_piece = 2 * pair * block_n * block_k, 2 * block_t * block_k
        sharing = plan.per_sm * (2 if plan.half else 1)
        room = (target.shared_bytes_per_block + 1024) // sharing - 1024 - 512
        most = parts.k // block_k // plan.splits
        if plan.short_x:
            x_ring = 3 if x_piece < 16384 else 2
            ring = early = min((room - x_ring * x_piece) // piece, most)
        else:
            x_ring = ring = min(room // (piece + x_piece), most)
            early = ceil_div(ring, 2)
        return {"BLOCK_T": block_t, "BLOCK_N": block_n, "BLOCK_K": block_k, "SHARE": share, "RING": ring,
                "EARLY": early, "X_RING": min(x_ring, ring)}  # fmt: skip

    def _block_rows(self, rows: int) -> int:
        least = _WIDE_T if self.plan.t >= _WIDE_T else MIN_DOT
        return min(self.plan.t, max(least, power_of_two(rows)))

    def _product(
        self, signature: OpSignature, parts: LinearParts, rows: int, target: CudaTarget
    ) -> LaunchSpec:
        cut = self._cut(parts, rows, target)
        constants = {
            "COUNT": count_index(signature), "N": parts.n, "K": parts.k, "SPLITS": self.plan.splits, **cut,
            **epilogue_constants(parts),
        }  # fmt: skip
        return launch(
            "linear.gluon_stream:streamed",
            self._arguments(signature, parts, OPERANDS, self._normed_at(parts, rows, target)),
            constants,
            (
                GridDim(0, ceil_div(parts.n, cut["SHARE"])),
                GridDim(cut["BLOCK_T"]),
                GridDim(0, self.plan.splits),
            ),
            self.plan.warps,
            1,
        )
