"""CUDA tactics of linear, norm_linear and linear_add: configurations of the kernels in triton*.py.

A configuration is one tactic: which is fastest for a shape and a number of rows is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.linear.cublaslt import CublasLt
from tapeout.plugins.linear.parts import LinearParts, norm_launches, normed_row_elements
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    TritonTactic,
    ceil_div,
    count_index,
    launch,
    pointer,
    power_of_two,
    step,
    workspace,
)

_REDUCE_BLOCK = 1024
_MAX_FLOAT32_K = 32
_MIN_DOT = 16
_WIDE_T = 64  # rows from which `streamed` multiplies with a warpgroup
_MOST_N, _LEAST_K, _MOST_K = 256, 64, 512  # weight rows and columns of a piece
_MOST_SUMS = 128  # a thread's
_AHEAD_K = 512  # columns of the weight that are asked for before a kernel's turn
_BARRIER_BYTES = 2048
#: Rough rates of a large device and one of its multiprocessors, for expected_us alone.
_BYTES_PER_US, _FLOAT32_FLOP_PER_US, _LAUNCH_US = 3.0e6, 0.2e6, 1.5
#: Share of the bandwidth that `skinny` draws where `gemv` draws all.
_SKINNY_SHARE = 0.7


@dataclass(frozen=True)
class Tile:
    """Sizes of one configuration. `t`, `n`, `k`: rows, weight rows and depth of a block's tile.

    With a gated activation `n` counts gates and ups: the block makes n / 2 outputs.
    """

    n: int
    k: int
    t: int = 1
    splits: int = 1
    warps: int = 4
    stages: int = 3
    group_m: int = 8
    subtiles: int = 1
    ahead: int = 0  # columns that are asked for early, beside the first tile

    @property
    def label(self) -> str:
        text = (f"{self.t}x" if self.t > 1 else "") + f"{self.n}x{self.k}"
        text += f"_split{self.splits}" if self.splits > 1 else ""
        text += f"_sub{self.subtiles}" if self.subtiles > 1 else ""
        text += f"_ahead{self.ahead}" if self.ahead else ""
        return f"{text}_w{self.warps}s{self.stages}"


@dataclass(frozen=True)
class StreamPlan:
    """How `streamed` cuts its work.

    Attributes:
        t: most rows of a block. per_sm: blocks that fill a multiprocessor. piece_bytes: of the weight, in a
            slot of the ring. short_x: x has a ring of three slots, which leaves more for the weight, but
            then the next pieces must wait for weights asked for before them.
    """

    t: int
    per_sm: int
    piece_bytes: int
    splits: int = 1
    warps: int = 4
    short_x: bool = False

    @property
    def label(self) -> str:
        text = f"stream_{self.t}_{self.per_sm}x{self.piece_bytes >> 10}k" + ("_short" if self.short_x else "")
        return text + (f"_split{self.splits}" if self.splits > 1 else "") + f"_w{self.warps}"


class _Linear(TritonTactic):
    """What all families share: arguments, constants, workspace, the launches around the product.

    The workspace holds the partial sums of the splits (float32), then the normed x where the kernel
    does not norm by itself.
    """

    #: Of one multiprocessor, only to rank tactics that were not timed.
    flop_per_us: float = 2.0e6
    #: Whether the kernel norms x itself.
    fuses_norm = False

    def __init__(self, op_name: str, family: str, tile: Tile) -> None:
        super().__init__(op_name)
        self.tile = tile
        self.name = f"triton_{family}_{tile.label}"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if reason := super().unsupported(signature, target):
            return reason
        if len(signature.inputs[0].shape) != 2:
            return f"x has shape {list(signature.inputs[0].shape)}, expected [T, K]"
        parts = LinearParts.of(signature)
        if self.tile.splits > 1 and parts.k < 2 * self.tile.splits * self.tile.k:
            return f"K = {parts.k} is too small for {self.tile.splits} splits of tiles {self.tile.k} deep"
        return None

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        """The larger of streaming the weight and computing the waves of tiles, and the launches."""
        tile, parts = self.tile, LinearParts.of(signature)
        n, k, wide = parts.weight_rows, parts.k, parts.dtype == "float32"
        tiles = ceil_div(rows, self._block_rows(rows)) * ceil_div(n, tile.n)
        blocks = tiles * tile.splits
        busy = min(1.0, blocks / (2 * target.sm_count))  # few blocks cannot draw the whole bandwidth
        passes = ceil_div(rows, self._block_rows(rows)) if tile.t == 1 else 1
        share = 1.0 if tile.t == 1 else _SKINNY_SHARE
        stream_us = passes * n * k * (4 if wide else 2) / (_BYTES_PER_US * busy * share)
        rate = _FLOAT32_FLOP_PER_US if wide or tile.t == 1 else self.flop_per_us
        rate *= tile.t * tile.n / (tile.t * tile.n + 4096)  # large tiles reuse more of what they load
        depth = ceil_div(k, tile.splits)
        compute_us = ceil_div(blocks, target.sm_count) * 2.0 * self._block_rows(rows) * tile.n * depth / rate
        launches = 1 + (tile.splits > 1) + self._norms_apart(parts)
        return max(stream_us, compute_us if tile.t > 1 else 0.0) + _LAUNCH_US * launches

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        parts = LinearParts.of(signature)
        normed = normed_row_elements(parts.k) * rows * (4 if parts.dtype == "float32" else 2)
        return self._normed_at(parts, rows, target) + (normed if self._norms_apart(parts) else 0)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        parts = LinearParts.of(signature)
        norm: tuple[LaunchSpec, ...] = ()
        if self._norms_apart(parts):
            norm = norm_launches(signature, rows, target, self._normed_at(parts, rows, target))
        return *norm, self._product(signature, parts, rows, target), *self._finish(signature, parts, target)

    def _product(
        self, signature: OpSignature, parts: LinearParts, rows: int, target: CudaTarget
    ) -> LaunchSpec:
        raise NotImplementedError

    def _finish(
        self, signature: OpSignature, parts: LinearParts, target: CudaTarget
    ) -> tuple[LaunchSpec, ...]:
        """What adds up the partial sums, if the product leaves any."""
        if self.tile.splits == 1:
            return ()
        block = min(_REDUCE_BLOCK, power_of_two(parts.n))
        constants = {
            "COUNT": count_index(signature), "N": parts.n, "SPLITS": self.tile.splits, "BLOCK": block,
            **_epilogue_constants(parts),
        }  # fmt: skip
        grid = (GridDim(1), GridDim(0, ceil_div(parts.n, block)))
        arguments = self._arguments(signature, parts, _REDUCED)
        return (launch("linear.triton:reduce_splits", arguments, constants, grid),)

    def _partial_bytes(self, parts: LinearParts, rows: int, target: CudaTarget) -> int:
        """Float32 partial sums at a bucket of `rows`."""
        return 4 * self.tile.splits * rows * parts.weight_rows if self.tile.splits > 1 else 0

    def _norms_apart(self, parts: LinearParts) -> bool:
        return parts.norm is not None and not self.fuses_norm

    def _normed_at(self, parts: LinearParts, rows: int, target: CudaTarget) -> int:
        """Where the normed x starts in the workspace: behind the partial sums."""
        return ceil_div(self._partial_bytes(parts, rows, target), 256) * 256

    def _block_rows(self, rows: int) -> int:
        """Rows of a block at a bucket of `rows`."""
        return self.tile.t

    def _block_n(self, parts: LinearParts) -> int:
        """Outputs of a block."""
        return max(1, self.tile.n // 2) if parts.activation else self.tile.n

    def _too_large(self, target: CudaTarget, out_bytes: int, element_bytes: int) -> str | None:
        """Whether the tile's stages and its way out leave the shared memory of a block."""
        tile = self.tile
        needed = tile.stages * (tile.t + tile.n) * tile.k * element_bytes + out_bytes + _BARRIER_BYTES
        if needed <= target.shared_bytes_per_block:
            return None
        return f"needs {needed} bytes of shared memory, SM {target.sm} has {target.shared_bytes_per_block}"

    def _arguments(
        self, signature: OpSignature, parts: LinearParts, names: tuple[str, ...], normed_at: int = 0
    ) -> list[Argument]:
        """Arguments by name; of operands that are absent a pointer that is never read.

        normed_at: where x lies in the workspace, if it is normed by a launch of its own.
        """
        dtype = parts.dtype
        x, x_row = Arg("input", 0), Arg("input_stride", 0, value=0)
        if self._norms_apart(parts):
            x = Arg("workspace", value=normed_at)
            x_row = Arg("i32", value=normed_row_elements(parts.k))
        residual = 0 if parts.residual is None else parts.residual
        bias = parts.weight if parts.bias is None else parts.bias
        gain = parts.weight if parts.norm is None else parts.norm
        known = [
            pointer("x", dtype, x),
            pointer("weight", dtype, Arg("weight", parts.weight)),
            pointer("bias", dtype, Arg("weight", bias)),
            pointer("residual", dtype, Arg("input", residual)),
            pointer("norm_weight", signature.weights[gain].dtype, Arg("weight", gain)),
            pointer("out", dtype, Arg("output", 0)),
            workspace("partial"),
            step("counts"),
            Argument("eps", "fp32", Arg("f32", value=float(signature.attrs.get("eps", 0.0)))),
            Argument("weight_offset", "fp32", Arg("f32", value=_weight_offset(signature))),
            Argument("x_row", "i32", x_row),
            Argument("residual_row", "i32", Arg("input_stride", residual, value=0)),
            Argument("out_row", "i32", Arg("output_stride", 0, value=0)),
        ]
        by_name = {a.name: a for a in known}
        return [by_name[name] for name in names]

    def _constants(self, signature: OpSignature, parts: LinearParts) -> dict[str, Any]:
        return {
            "COUNT": count_index(signature), "N": parts.n, "K": parts.k, "BLOCK_N": self._block_n(parts),
            "BLOCK_K": self.tile.k, **_epilogue_constants(parts),
        }  # fmt: skip


def _weight_offset(signature: OpSignature) -> float:
    return float(signature.attrs.get("weight_offset", 0.0))


def _epilogue_constants(parts: LinearParts) -> dict[str, Any]:
    return {
        "HAS_BIAS": parts.bias is not None, "ACTIVATION": parts.activation,
        "HAS_RESIDUAL": parts.residual is not None,
    }  # fmt: skip


def _no_copy_engine(signature: OpSignature, target: CudaTarget) -> str | None:
    """Why tiles cannot come through the copy engine."""
    if target.sm < 90:
        return f"SM {target.sm} has no bulk tensor copy engine"
    if signature.inputs[0].dtype != "bfloat16":
        return "float32 products run on the ordinary units"
    if (k := int(signature.inputs[0].shape[-1])) % 8:
        return f"rows of {k} elements are no multiple of 16 bytes"
    return None


_REDUCED = ("partial", "bias", "residual", "out", "counts", "residual_row", "out_row")
_OPERANDS = (
    "x", "weight", "bias", "residual", "out", "partial", "counts", "x_row", "residual_row", "out_row",
)  # fmt: skip


class Gemv(_Linear):
    """`gemv`: products in registers, one row after the other.

    `norm_apart`: a norm_linear's x is normed by a launch of its own, which pays where blocks are many.
    """

    def __init__(self, op_name: str, tile: Tile, *, norm_apart: bool = False) -> None:
        super().__init__(op_name, "gemv_after_norm" if norm_apart else "gemv", tile)
        self.fuses_norm = not norm_apart
        self.max_rows = 4

    def _product(
        self, signature: OpSignature, parts: LinearParts, rows: int, target: CudaTarget
    ) -> LaunchSpec:
        tile, norms = self.tile, parts.norm is not None and self.fuses_norm
        constants = {
            **self._constants(signature, parts), "SPLITS": tile.splits, "HAS_NORM": norms,
            "CAST_FIRST": norms and bool(signature.attrs["cast_before_weight"]),
            "HAS_OFFSET": norms and _weight_offset(signature) != 0, "AHEAD": tile.ahead,
        }  # fmt: skip
        names = (
            "x", "weight", "bias", "residual", "norm_weight", "out", "partial", "counts", "eps",
            "weight_offset", "x_row", "residual_row", "out_row",
        )  # fmt: skip
        return launch(
            "linear.triton:gemv",
            self._arguments(signature, parts, names, self._normed_at(parts, rows, target)),
            constants,
            (GridDim(0, ceil_div(parts.n, self._block_n(parts))), GridDim(1), GridDim(0, tile.splits)),
            tile.warps,
            tile.stages,
        )


class Skinny(_Linear):
    """`skinny`: the row block grows with the bucket up to `tile.t`."""

    batch_invariant = False  # another row block may add up in another order

    def __init__(self, op_name: str, tile: Tile) -> None:
        super().__init__(op_name, "skinny", tile)
        self.max_rows = 2 * tile.t

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if reason := super().unsupported(signature, target):
            return reason
        parts = LinearParts.of(signature)
        if self._block_n(parts) < _MIN_DOT:
            return f"{self._block_n(parts)} outputs a block are below {_MIN_DOT}"
        return self._too_large(target, 0, 4 if parts.dtype == "float32" else 2)

    def _block_rows(self, rows: int) -> int:
        return min(self.tile.t, max(_MIN_DOT, power_of_two(rows)))

    def _product(
        self, signature: OpSignature, parts: LinearParts, rows: int, target: CudaTarget
    ) -> LaunchSpec:
        tile, block_t = self.tile, self._block_rows(rows)
        constants = {**self._constants(signature, parts), "SPLITS": tile.splits, "BLOCK_T": block_t}
        constants["AHEAD"] = min(_AHEAD_K, power_of_two(parts.k))
        if parts.dtype == "float32":  # products on the ordinary units are unrolled
            constants["BLOCK_K"] = min(tile.k, _MAX_FLOAT32_K)
        return launch(
            "linear.triton:skinny",
            self._arguments(signature, parts, _OPERANDS, self._normed_at(parts, rows, target)),
            constants,
            (GridDim(0, ceil_div(parts.n, self._block_n(parts))), GridDim(block_t), GridDim(0, tile.splits)),
            tile.warps,
            tile.stages,
        )


class Tiled(_Linear):
    """`tiled`: one tile a block, pointers; every SM."""

    def __init__(self, op_name: str, tile: Tile, dtype: str) -> None:
        super().__init__(op_name, "tiled", tile)
        self._dtype = dtype

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if signature.inputs[0].dtype != self._dtype:
            return f"the tile is meant for {self._dtype}"
        element_bytes = 4 if self._dtype == "float32" else 2
        return self._too_large(target, 0, element_bytes) or super().unsupported(signature, target)

    def _product(
        self, signature: OpSignature, parts: LinearParts, rows: int, target: CudaTarget
    ) -> LaunchSpec:
        tile = self.tile
        constants = {**self._constants(signature, parts), "BLOCK_M": tile.t, "GROUP_M": tile.group_m}
        grid = (GridDim(tile.t, ceil_div(parts.n, self._block_n(parts))),)
        names = tuple(n for n in _OPERANDS if n != "partial")
        arguments = self._arguments(signature, parts, names, self._normed_at(parts, rows, target))
        return launch("linear.triton_gemm:tiled", arguments, constants, grid, tile.warps, tile.stages)


class Persistent(_Linear):
    """`persistent`: one block a multiprocessor, tiles through the copy engine; SM 90 and above."""

    flop_per_us = 5.0e6

    def __init__(self, op_name: str, tile: Tile) -> None:
        super().__init__(op_name, "tma", tile)

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if reason := _no_copy_engine(signature, target):
            return reason
        out_bytes = 2 * self.tile.t * self._block_n(LinearParts.of(signature)) // self.tile.subtiles
        return self._too_large(target, out_bytes, 2) or super().unsupported(signature, target)

    def _product(
        self, signature: OpSignature, parts: LinearParts, rows: int, target: CudaTarget
    ) -> LaunchSpec:
        tile = self.tile
        constants = {
            **self._constants(signature, parts), "BLOCK_M": tile.t, "GROUP_M": tile.group_m,
            "SUBTILES": 1 if parts.activation else tile.subtiles,
        }  # fmt: skip
        tiles = ceil_div(rows, tile.t) * ceil_div(parts.n, self._block_n(parts))
        names = tuple(n for n in _OPERANDS if n != "partial")
        return launch(
            "linear.triton_gemm:persistent",
            self._arguments(signature, parts, names, self._normed_at(parts, rows, target)),
            constants,
            (GridDim(0, min(target.sm_count, tiles)),),
            tile.warps,
            tile.stages,
        )


class Stream(_Linear):
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
        factor = max(1 + 0.07 * (beside - 1), beside / 2) * (0.97 if plan.per_sm > 1 else 1.0)
        if plan.short_x:
            factor *= 0.97 if 4 * cut["BLOCK_T"] <= pair * cut["BLOCK_N"] else 1.3
        launches = 1 + (plan.splits > 1) + self._norms_apart(parts)
        return weight_bytes / _BYTES_PER_US * factor + _LAUNCH_US * launches

    def _shares(self, target: CudaTarget) -> int:
        """Blocks of one split in a wave."""
        return max(1, self.plan.per_sm * target.sm_count // self.plan.splits)

    def _cut(self, parts: LinearParts, rows: int, target: CudaTarget) -> dict[str, int]:
        """How the work is cut at a bucket of `rows`."""
        plan, pair = self.plan, 2 if parts.activation else 1
        block_t, shares = self._block_rows(rows), self._shares(target)
        waves = ceil_div(pair * ceil_div(parts.n, shares), _MOST_N)
        share = ceil_div(ceil_div(parts.n, shares * waves), 4) * 4
        block_n = max(_MIN_DOT, power_of_two(share))
        block_k = max(_LEAST_K, min(_MOST_K, plan.piece_bytes // (2 * pair * block_n)))
        while parts.k % block_k:
            block_k //= 2
        piece, x_piece = 2 * pair * block_n * block_k, 2 * block_t * block_k
        room = (target.shared_bytes_per_block + 1024) // plan.per_sm - 1024 - 512
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
        least = _WIDE_T if self.plan.t >= _WIDE_T else _MIN_DOT
        return min(self.plan.t, max(least, power_of_two(rows)))

    def _product(
        self, signature: OpSignature, parts: LinearParts, rows: int, target: CudaTarget
    ) -> LaunchSpec:
        cut = self._cut(parts, rows, target)
        constants = {
            "COUNT": count_index(signature), "N": parts.n, "K": parts.k, "SPLITS": self.plan.splits, **cut,
            **_epilogue_constants(parts),
        }  # fmt: skip
        return launch(
            "linear.gluon_stream:streamed",
            self._arguments(signature, parts, _OPERANDS, self._normed_at(parts, rows, target)),
            constants,
            (
                GridDim(0, ceil_div(parts.n, cut["SHARE"])),
                GridDim(cut["BLOCK_T"]),
                GridDim(0, self.plan.splits),
            ),
            self.plan.warps,
            1,
        )


_GEMV = (
    Tile(n=4, k=1024),
    Tile(n=8, k=512),
    Tile(n=2, k=2048),
    Tile(n=4, k=512, warps=2),
    Tile(n=2, k=1024, warps=2),
    Tile(n=4, k=2048, warps=8),
    Tile(n=8, k=1024),
    Tile(n=16, k=512),
    Tile(n=2, k=4096),
    Tile(n=4, k=1024, ahead=1024),
    Tile(n=4, k=1024, ahead=4096),
    Tile(n=8, k=512, ahead=2048),
    Tile(n=2, k=2048, ahead=4096),
    Tile(n=4, k=4096, warps=8),
    Tile(n=4, k=1024, splits=4),
    Tile(n=2, k=2048, splits=2),
)
_SKINNY = (
    Tile(t=64, n=32, k=64),
    Tile(t=64, n=64, k=64, stages=5),
    Tile(t=64, n=64, k=128, stages=4),
    Tile(t=64, n=64, k=128, stages=4, splits=2),
    Tile(t=64, n=64, k=128, stages=4, splits=4),
    Tile(t=64, n=64, k=128, splits=2),  # for SMs with 100 KB of shared memory
    Tile(t=64, n=64, k=128, splits=4),
)
_PERSISTENT = (
    Tile(t=128, n=256, k=64, warps=8, stages=3),
    Tile(t=128, n=256, k=64, warps=8, stages=4, subtiles=2),
    Tile(t=128, n=128, k=64, warps=8, stages=4),
    Tile(t=64, n=256, k=64, warps=4, stages=4),
    Tile(t=64, n=128, k=64, warps=4, stages=3),  # what SM 120 has room for
    Tile(t=64, n=128, k=128, warps=4, stages=4),
    Tile(t=64, n=64, k=128, warps=4, stages=5),
)
_STREAM = (
    StreamPlan(32, 1, 32 << 10),
    StreamPlan(32, 2, 16 << 10),
    StreamPlan(32, 2, 32 << 10, short_x=True),
    StreamPlan(32, 1, 32 << 10, splits=2),
    StreamPlan(32, 2, 16 << 10, splits=4),
    StreamPlan(128, 1, 32 << 10),
    StreamPlan(128, 1, 16 << 10),
    StreamPlan(128, 1, 16 << 10, warps=8),
    StreamPlan(128, 2, 16 << 10, short_x=True),
    StreamPlan(128, 1, 16 << 10, splits=2),
    StreamPlan(128, 1, 32 << 10, splits=4),
)


def linear_tactics(op_name: str) -> tuple[CudaTactic, ...]:
    """All configurations for `linear` or an op built around one, the one that works everywhere first."""
    apart = _GEMV[:4] if op_name == "norm_linear" else ()
    return (
        Skinny(op_name, _SKINNY[0]),
        *(Gemv(op_name, tile) for tile in _GEMV),
        *(Gemv(op_name, tile, norm_apart=True) for tile in apart),
        *(Skinny(op_name, tile) for tile in _SKINNY[1:]),
        Tiled(op_name, Tile(t=64, n=64, k=32), "float32"),
        Tiled(op_name, Tile(t=64, n=64, k=64), "bfloat16"),
        Tiled(op_name, Tile(t=128, n=128, k=64, warps=8), "bfloat16"),
        *(Persistent(op_name, tile) for tile in _PERSISTENT),
        *(Stream(op_name, tile) for tile in _STREAM),
        CublasLt(op_name),
    )


TACTICS: tuple[CudaTactic, ...] = linear_tactics("linear")
