"""CUDA tactics of linear, norm_linear and linear_add: configurations of the kernels in triton*.py.

A configuration is one tactic: which is fastest for a shape and a number of rows is measured.
"""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.linear.cublaslt import CublasLt
from tapeout.plugins.linear.cuda_family import (
    MIN_DOT,
    OPERANDS,
    LinearFamily,
    Tile,
    no_copy_engine,
    weight_offset,
)
from tapeout.plugins.linear.cuda_stream import Stream, StreamPlan
from tapeout.plugins.linear.parts import LinearParts
from tapeout.plugins.triton_aot.tactic import (
    ceil_div,
    launch,
    power_of_two,
)

_MAX_FLOAT32_K = 32
_FETCHED_K = 64  # columns of a bfloat16 weight that one fetch brings
_AHEAD_K = 512  # columns of the weight that are asked for before a kernel's turn


class Gemv(LinearFamily):
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
            "HAS_OFFSET": norms and weight_offset(signature) != 0, "AHEAD": tile.ahead,
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
            prefers_l1=True,
        )


class Skinny(LinearFamily):
    """`skinny`: the row block grows with the bucket up to `tile.t`."""

    batch_invariant = False  # another row block may add up in another order

    def __init__(self, op_name: str, tile: Tile) -> None:
        super().__init__(op_name, "skinny", tile)
        self.max_rows = 2 * tile.t

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if reason := super().unsupported(signature, target):
            return reason
        parts = LinearParts.of(signature)
        if self._block_n(parts) < MIN_DOT:
            return f"{self._block_n(parts)} outputs a block are below {MIN_DOT}"
        return self._too_large(target, 0, 4 if parts.dtype == "float32" else 2)

    def _block_rows(self, rows: int) -> int:
        return min(self.tile.t, max(MIN_DOT, power_of_two(rows)))

    def _product(
        self, signature: OpSignature, parts: LinearParts, rows: int, target: CudaTarget
    ) -> LaunchSpec:
        tile, block_t = self.tile, self._block_rows(rows)
        constants = {**self._constants(signature, parts), "SPLITS": tile.splits, "BLOCK_T": block_t}
        constants["AHEAD"] = min(_AHEAD_K, max(_FETCHED_K, power_of_two(parts.k)))
        if parts.dtype == "float32":  # products on the ordinary units are unrolled
            constants["BLOCK_K"] = min(tile.k, _MAX_FLOAT32_K)
        return launch(
            "linear.triton:skinny",
            self._arguments(signature, parts, OPERANDS, self._normed_at(parts, rows, target)),
            constants,
            (GridDim(0, ceil_div(parts.n, self._block_n(parts))), GridDim(block_t), GridDim(0, tile.splits)),
            tile.warps,
            tile.stages,
        )


class Tiled(LinearFamily):
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
        names = tuple(n for n in OPERANDS if n != "partial")
        arguments = self._arguments(signature, parts, names, self._normed_at(parts, rows, target))
        return launch("linear.triton_gemm:tiled", arguments, constants, grid, tile.warps, tile.stages)


class Persistent(LinearFamily):
    """`persistent`: one block a multiprocessor, tiles through the copy engine; SM 90 and above."""

    flop_per_us = 5.0e6

    def __init__(self, op_name: str, tile: Tile) -> None:
        super().__init__(op_name, "tma", tile)

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if reason := no_copy_engine(signature, target):
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
        names = tuple(n for n in OPERANDS if n != "partial")
        return launch(
            "linear.triton_gemm:persistent",
            self._arguments(signature, parts, names, self._normed_at(parts, rows, target)),
            constants,
            (GridDim(0, min(target.sm_count, tiles)),),
            tile.warps,
            tile.stages,
        )


class Paired(LinearFamily):
    """`paired`: clusters of two blocks that share the weight's tiles; SM 90."""

    flop_per_us = 5.5e6
    interpretable = False

    def __init__(self, op_name: str, tile: Tile) -> None:
        super().__init__(op_name, "pair", tile)

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if target.sm != 90:
            return f"SM {target.sm} has no warpgroup products"
        if reason := no_copy_engine(signature, target):
            return reason
        way_out = self.tile.t * self.tile.n  # half a tile, in two bytes an element
        return self._too_large(target, way_out, 2) or super().unsupported(signature, target)

    def _block_rows(self, rows: int) -> int:
        return 2 * self.tile.t

    def _product(
        self, signature: OpSignature, parts: LinearParts, rows: int, target: CudaTarget
    ) -> LaunchSpec:
        tile = self.tile
        constants = {
            **self._constants(signature, parts), "BLOCK_M": tile.t, "GROUP_M": tile.group_m,
            "RING": tile.stages,
        }  # fmt: skip
        tiles = ceil_div(rows, 2 * tile.t) * ceil_div(parts.n, self._block_n(parts))
        names = tuple(n for n in OPERANDS if n != "partial")
        return launch(
            "linear.gluon_gemm:paired",
            self._arguments(signature, parts, names, self._normed_at(parts, rows, target)),
            constants,
            (GridDim(0, min(target.sm_count // 2, tiles)),),
            tile.warps,
            1,
            cluster=2,
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
    Tile(t=128, n=256, k=64, warps=8, stages=3, subtiles=2),
    Tile(t=128, n=256, k=64, warps=8, stages=4, subtiles=2),
    Tile(t=128, n=256, k=64, warps=8, stages=4, subtiles=4),
    Tile(t=128, n=128, k=64, warps=8, stages=4),
    Tile(t=64, n=256, k=64, warps=4, stages=4),
    Tile(t=64, n=128, k=64, warps=4, stages=3),  # what SM 120 has room for
    Tile(t=64, n=128, k=128, warps=4, stages=4),
    Tile(t=64, n=64, k=128, warps=4, stages=5),
)
_PAIRED = (
    Tile(t=128, n=256, k=64, warps=8, stages=4),
    Tile(t=128, n=256, k=64, warps=8, stages=4, group_m=4),
    Tile(t=128, n=256, k=64, warps=8, stages=4, group_m=16),
)
_STREAM = (
    StreamPlan(32, 1, 32 << 10),
    StreamPlan(32, 2, 32 << 10, short_x=True),
    StreamPlan(32, 1, 32 << 10, splits=2),
    StreamPlan(32, 2, 16 << 10, splits=4),
    StreamPlan(32, 1, 16 << 10, half=True),
    StreamPlan(32, 1, 32 << 10, short_x=True, half=True),
    StreamPlan(32, 1, 16 << 10, splits=2, half=True),
    StreamPlan(32, 1, 8 << 10, half=True),
    StreamPlan(32, 1, 8 << 10, splits=2, half=True),
    StreamPlan(32, 1, 16 << 10, splits=4, half=True),
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
        *(Paired(op_name, tile) for tile in _PAIRED),
        *(Stream(op_name, tile) for tile in _STREAM),
        CublasLt(op_name),
    )


TACTICS: tuple[CudaTactic, ...] = linear_tactics("linear")
