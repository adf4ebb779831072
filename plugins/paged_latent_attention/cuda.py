"""CUDA tactics of paged_latent_attention: queries into the latents' space, attention there, and back."""

from __future__ import annotations

import math

from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.triton_aot.elementwise_tactic import block_of
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    TritonTactic,
    ceil_div,
    launch,
    pointer,
    power_of_two,
    step,
    strides,
    workspace,
)

_LOG2_E = math.log2(math.e)
_MAX_RANK, _MAX_SPLITS, _FEW_ROWS = 512, 64, 64
_COLUMNS, _DEPTH = 64, 64  # of a tile of the products by head


class LatentAttention(TritonTactic):
    """Every row by itself, up to `heads` of its heads in a tile over blocks of latents.

    The workspace holds the queries in the latents' space [rows, heads, rank], which attention replaces by
    its results; then, of `split` tactics, the splits' sums.

    Args:
        rows: of a tile of the products by head.
        heads: most heads of a row that share a tile.
        split: whether a row's cache is split over blocks, as many as few rows need to fill the device.
    """

    op = "paged_latent_attention"

    def __init__(self, rows: int, heads: int, *, split: bool) -> None:
        super().__init__()
        self._rows, self._heads, self._split = rows, heads, split
        self.batch_invariant = not split
        self.name = f"{'split' if split else 'rows'}_{rows}x{heads}"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        q, _, latent, k_rot = signature.inputs
        rank, rotary = int(latent.shape[1]), int(k_rot.shape[1])
        if rank > _MAX_RANK:
            return f"latents of {rank} elements are longer than {_MAX_RANK}"
        if (rank + rotary) % 2:
            return f"latents of {rank} and rotated keys of {rotary} elements have no halves"
        if {w.dtype for w in signature.weights} != {q.dtype}:
            return "weights have another dtype than the queries"
        if target.kv_dtype not in ("", "float32", "bfloat16"):
            return f"no CUDA kernel for a cache of {target.kv_dtype}"
        tile = self._heads_block(signature) + _stages(q) * _tokens(q)
        line = max(16, power_of_two(rank)) + max(16, power_of_two(rotary))
        needed = tile * line * (4 if q.dtype == "float32" else 2)
        if needed > target.shared_bytes_per_block:
            return (
                f"needs {needed} bytes of shared memory, SM {target.sm} has {target.shared_bytes_per_block}"
            )
        return super().unsupported(signature, target)

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        preferred = rows <= _FEW_ROWS if self._split else self._rows > 16
        narrow = 0.1 * (self._heads < min(64, int(signature.inputs[0].shape[1])))
        return (1.0 if preferred else 2.0) - 0.5 * self._split + narrow

    def splits(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        """A power of two that gives each multiprocessor about four blocks."""
        if not self._split:
            return 1
        blocks = rows * ceil_div(int(signature.inputs[0].shape[1]), self._heads_block(signature))
        return min(_MAX_SPLITS, power_of_two(max(1, 4 * target.sm_count // blocks)))

    def _heads_block(self, signature: OpSignature) -> int:
        q = signature.inputs[0]
        most = self._heads if q.dtype == "bfloat16" else 16
        return max(16, min(most, power_of_two(int(q.shape[1]))))

    def _partials_at(self, signature: OpSignature, rows: int) -> int:
        heads, rank = int(signature.inputs[0].shape[1]), int(signature.inputs[2].shape[1])
        size = 4 if signature.inputs[0].dtype == "float32" else 2
        return ceil_div(rows * heads * rank * size, 256) * 256

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        splits = self.splits(signature, rows, target)
        heads, rank = int(signature.inputs[0].shape[1]), int(signature.inputs[2].shape[1])
        partials = 4 * rows * heads * splits * (rank + 2) if splits > 1 else 0
        return self._partials_at(signature, rows) + partials

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        splits = self.splits(signature, rows, target)
        known = self._arguments(signature, rows, splits, target)
        q, latent, out = signature.inputs[0], signature.inputs[2], signature.outputs[0]
        nope, rank, value = int(q.shape[2]), int(latent.shape[1]), int(out.shape[2])
        launches = [
            self._write(signature, known, target),
            self._product(signature, known, ("q", "up_key", "queries"), (rank, nope), (1, rank)),
            self._attend(signature, known, splits, target),
        ]
        if splits > 1:
            launches.append(self._join(signature, known, splits))
        back = self._product(signature, known, ("queries", "up_value", "out"), (value, rank), (rank, 1))
        return *launches, back

    def _arguments(
        self, signature: OpSignature, rows: int, splits: int, target: CudaTarget
    ) -> dict[str, Argument]:
        """Every argument of every kernel by name."""
        q, rot, latent, k_rot = signature.inputs
        out, attrs = signature.outputs[0], signature.attrs
        heads, rank = int(q.shape[1]), int(latent.shape[1])
        at = self._partials_at(signature, rows)
        if splits > 1:
            partials = [
                workspace("partial", offset_bytes=at),
                workspace("partial_ml", offset_bytes=at + 4 * rows * heads * splits * rank),
            ]
        else:  # never touched
            partials = [workspace(name) for name in ("partial", "partial_ml")]
        arguments = [
            pointer("q", q.dtype, Arg("input", 0)),
            pointer("q_rot", rot.dtype, Arg("input", 1)),
            pointer("latent", latent.dtype, Arg("input", 2)),
            pointer("k_rot", k_rot.dtype, Arg("input", 3)),
            *(pointer(n, q.dtype, Arg("weight", i)) for i, n in enumerate(("up_key", "up_value"))),
            pointer("out", out.dtype, Arg("output", 0)),
            workspace("queries", q.dtype), workspace("mixed", q.dtype), *partials,
            *(step(n) for n in ("counts", "positions", "row_seqs", "page_table")),
            pointer("kv_pool", target.kv_dtype or latent.dtype, Arg("step", name="kv_pool")),
            *strides("q", q, "input", 0), *strides("rot", rot, "input", 1), *strides("out", out, "output", 0),
            Argument("queries_row", "i32", Arg("i32", value=heads * rank)),
            Argument("queries_group", "i32", Arg("i32", value=rank)),
            *(Argument(f"{n}_row", "i32", Arg("input_stride", i, value=0))
              for i, n in ((2, "latent"), (3, "k_rot"))),
            Argument("scale", "fp32", Arg("f32", value=float(attrs["scale"]) * _LOG2_E)),
            Argument("window", "i32", Arg("i32", value=int(attrs["window"]))),
            *(Argument(n, "i32", Arg(n)) for n in ("layers", "max_pages")),
            Argument("layer", "i32", Arg("attr", name="layer")),
        ]  # fmt: skip
        return {a.name: a for a in arguments}

    def _write(self, signature: OpSignature, known: dict[str, Argument], target: CudaTarget) -> LaunchSpec:
        rank, rotary = (int(signature.inputs[i].shape[1]) for i in (2, 3))
        block, warps = block_of(rank + rotary)
        names = (
            "latent", "k_rot", "counts", "positions", "row_seqs", "page_table", "kv_pool", "latent_row",
            "k_rot_row", "layers", "layer", "max_pages",
        )  # fmt: skip
        return launch(
            "paged_latent_attention.triton:write_latents",
            [known[n] for n in names],
            {"RANK": rank, "ROTARY": rotary, "PAGE": target.tokens_per_page, "BLOCK": block},
            (GridDim(1), GridDim(0, ceil_div(rank + rotary, block))),
            warps,
        )

    def _product(
        self,
        signature: OpSignature,
        known: dict[str, Argument],
        names: tuple[str, str, str],
        size: tuple[int, int],
        weight_strides: tuple[int, int],
    ) -> LaunchSpec:
        """names: of x, weight and out; size and weight_strides: along N and K."""
        x, weight, out = names
        arguments = [(x, "x"), (weight, "weight"), (out, "out"), ("counts", "counts")]
        arguments += [
            (f"{name}_{part}", f"{as_}_{part}")
            for name, as_ in ((x, "x"), (out, "out"))
            for part in ("row", "group")
        ]
        constants = {
            "N": size[0], "K": size[1], "WEIGHT_N": weight_strides[0], "WEIGHT_K": weight_strides[1],
            "BLOCK_M": self._rows, "BLOCK_N": _COLUMNS, "BLOCK_K": _DEPTH,
        }  # fmt: skip
        heads = int(signature.inputs[0].shape[1])
        return launch(
            "paged_latent_attention.triton:product_by_head",
            [Argument(as_, known[n].kind, known[n].source, known[n].aligned) for n, as_ in arguments],
            constants,
            (GridDim(self._rows), GridDim(0, heads), GridDim(0, ceil_div(size[0], _COLUMNS))),
        )

    def _sizes(self, signature: OpSignature, splits: int) -> dict[str, int | bool]:
        q, _, latent, _ = signature.inputs
        rank = int(latent.shape[1])
        return {
            "HEADS": int(q.shape[1]), "RANK": rank, "RANK_BLOCK": max(16, power_of_two(rank)),
            "BLOCK_N": _tokens(q), "SPLITS": splits,
            "WINDOW": int(signature.attrs["window"]) > 0,
        }  # fmt: skip

    def _attend(
        self, signature: OpSignature, known: dict[str, Argument], splits: int, target: CudaTarget
    ) -> LaunchSpec:
        heads_block, rotary = self._heads_block(signature), int(signature.inputs[3].shape[1])
        sizes = self._sizes(signature, splits)
        constants = {
            **sizes, "ROTARY": rotary, "ROTARY_BLOCK": max(16, power_of_two(rotary)),
            "PAGE": target.tokens_per_page, "HEADS_BLOCK": heads_block,
        }  # fmt: skip
        names = (
            "queries", "q_rot", "mixed", "partial", "partial_ml", "counts", "positions", "row_seqs",
            "page_table", "kv_pool", "rot_row", "rot_group", "scale", "window", "layers", "layer",
            "max_pages",
        )  # fmt: skip
        head_blocks = ceil_div(int(sizes["HEADS"]), heads_block)
        return launch(
            "paged_latent_attention.triton:attend_latents",
            [known[n] for n in names],
            constants,
            (GridDim(1), GridDim(0, head_blocks), GridDim(0, splits)),
            8 if heads_block * int(sizes["RANK_BLOCK"]) >= 8192 else 4,
            _stages(signature.inputs[0]),
        )

    def _join(self, signature: OpSignature, known: dict[str, Argument], splits: int) -> LaunchSpec:
        sizes = self._sizes(signature, splits)
        names = ("mixed", "partial", "partial_ml", "counts", "positions", "window")
        return launch(
            "paged_latent_attention.triton:join_latents",
            [known[n] for n in names],
            sizes,
            (GridDim(1), GridDim(0, int(sizes["HEADS"]))),
        )


def _tokens(q: TensorType) -> int:
    """Of a tile of latents."""
    return 32 if q.dtype == "bfloat16" else 16


def _stages(q: TensorType) -> int:
    """Tiles of latents that are on their way at once."""
    return 2 if q.dtype == "bfloat16" else 1


TACTICS: tuple[CudaTactic, ...] = (
    LatentAttention(64, 64, split=False),
    LatentAttention(64, 16, split=False),
    LatentAttention(16, 64, split=True),
    LatentAttention(16, 16, split=True),
)
