"""CUDA tactics of linear: configurations of the kernels in triton.py and triton_gemm.py.

A configuration is one tactic: which is fastest for a shape and a number of rows is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
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
_BARRIER_BYTES = 2048
#: Rough rates of a large device and one of its multiprocessors, for expected_us alone.
_BYTES_PER_US, _FLOAT32_FLOP_PER_US, _LAUNCH_US = 3.0e6, 0.2e6, 1.5


@dataclass(frozen=True)
class Tile:
    """Sizes of one configuration. `t`, `n`, `k`: rows, outputs and depth of a block's tile."""

    n: int
    k: int
    t: int = 1
    splits: int = 1
    warps: int = 4
    stages: int = 3
    group_m: int = 8
    subtiles: int = 1

    @property
    def label(self) -> str:
        text = (f"{self.t}x" if self.t > 1 else "") + f"{self.n}x{self.k}"
        text += f"_split{self.splits}" if self.splits > 1 else ""
        return f"{text}_w{self.warps}s{self.stages}"


class _Linear(TritonTactic):
    op = "linear"
    #: Of one multiprocessor, only to rank tactics that were not timed.
    flop_per_us: float = 2.0e6

    def __init__(self, family: str, tile: Tile) -> None:
        super().__init__()
        self.tile = tile
        self.name = f"triton_{family}_{tile.label}"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if reason := super().unsupported(signature, target):
            return reason
        if len(signature.inputs[0].shape) != 2:
            return f"x has shape {list(signature.inputs[0].shape)}, expected [T, K]"
        return None

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        """The larger of streaming the weight and computing the waves of tiles, and a launch."""
        tile, (n, k) = self.tile, (int(d) for d in signature.weights[0].shape)
        wide = signature.inputs[0].dtype == "float32"
        tiles = ceil_div(rows, self._block_rows(rows)) * ceil_div(n, tile.n)
        blocks = tiles * tile.splits
        busy = min(1.0, blocks / (2 * target.sm_count))  # few blocks cannot draw the whole bandwidth
        passes = ceil_div(rows, self._block_rows(rows)) if tile.t == 1 else 1
        stream_us = passes * n * k * (4 if wide else 2) / (_BYTES_PER_US * busy)
        rate = _FLOAT32_FLOP_PER_US if wide or tile.t == 1 else self.flop_per_us
        rate *= tile.t * tile.n / (tile.t * tile.n + 4096)  # large tiles reuse more of what they load
        depth = ceil_div(k, tile.splits)
        compute_us = ceil_div(blocks, target.sm_count) * 2.0 * self._block_rows(rows) * tile.n * depth / rate
        padded = 1.0 if rows > 1 or tile.t == 1 else 1.05
        return padded * max(stream_us, compute_us) + _LAUNCH_US * (2 if tile.splits > 1 else 1)

    def _block_rows(self, rows: int) -> int:
        """Rows of a block at a bucket of `rows`."""
        return self.tile.t

    def _too_large(self, target: CudaTarget, out_bytes: int, element_bytes: int) -> str | None:
        """Whether the tile's stages and its way out leave the shared memory of a block."""
        tile = self.tile
        needed = tile.stages * (tile.t + tile.n) * tile.k * element_bytes + out_bytes + _BARRIER_BYTES
        if needed <= target.shared_bytes_per_block:
            return None
        return f"needs {needed} bytes of shared memory, SM {target.sm} has {target.shared_bytes_per_block}"

    def _arguments(self, signature: OpSignature, with_partial: bool) -> list[Argument]:
        dtype = signature.inputs[0].dtype
        bias = Arg("weight", 1 if len(signature.weights) > 1 else 0)  # absent: never read
        return [
            pointer("x", dtype, Arg("input", 0)),
            pointer("weight", dtype, Arg("weight", 0)),
            pointer("bias", dtype, bias),
            pointer("out", dtype, Arg("output", 0)),
            *([self._partial()] if with_partial else []),
            step("counts"),
            Argument("x_row", "i32", Arg("input_stride", 0, value=0)),
            Argument("out_row", "i32", Arg("output_stride", 0, value=0)),
        ]

    def _partial(self) -> Argument:
        """The partial sums; without splits the kernel takes `out` there and does not touch it."""
        if self.tile.splits > 1:
            return workspace("partial")
        return Argument("partial", "*fp32", Arg("output", 0))

    def _constants(self, signature: OpSignature) -> dict[str, Any]:
        n, k = (int(d) for d in signature.weights[0].shape)
        return {
            "COUNT": count_index(signature), "N": n, "K": k, "BLOCK_N": self.tile.n, "BLOCK_K": self.tile.k,
            "HAS_BIAS": len(signature.weights) > 1,
        }  # fmt: skip


class StreamingLinear(_Linear):
    """`gemv` (tile.t = 1) or `skinny`; with splits, a second launch adds the partial sums.

    The row block of `skinny` grows with the bucket up to `tile.t`.
    """

    def __init__(self, tile: Tile) -> None:
        super().__init__("skinny" if tile.t > 1 else "gemv", tile)
        self.max_rows = 4 * tile.t if tile.t > 1 else 4
        self.batch_invariant = tile.t == 1  # another row block may add up in another order

    def _block_rows(self, rows: int) -> int:
        return min(self.tile.t, max(16, power_of_two(rows))) if self.tile.t > 1 else 1

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        k = int(signature.inputs[0].shape[-1])
        if self.tile.splits > 1 and k < 2 * self.tile.splits * self.tile.k:
            return f"K = {k} is too small for {self.tile.splits} splits of tiles {self.tile.k} deep"
        return super().unsupported(signature, target)

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        if self.tile.splits == 1:
            return 0
        return 4 * self.tile.splits * rows * int(signature.weights[0].shape[0])

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        tile, n = self.tile, int(signature.weights[0].shape[0])
        constants = {**self._constants(signature), "SPLITS": tile.splits}
        block_t = self._block_rows(rows)
        if tile.t > 1:
            constants["BLOCK_T"] = block_t
            if signature.inputs[0].dtype == "float32":  # products on the ordinary units are unrolled
                constants["BLOCK_K"] = min(tile.k, _MAX_FLOAT32_K)
        main = launch(
            "linear.triton:skinny" if tile.t > 1 else "linear.triton:gemv",
            self._arguments(signature, with_partial=True),
            constants,
            (GridDim(0, ceil_div(n, tile.n)), GridDim(block_t), GridDim(0, tile.splits)),
            tile.warps,
            tile.stages,
        )
        return (main, self._reduce(signature)) if tile.splits > 1 else (main,)

    def _reduce(self, signature: OpSignature) -> LaunchSpec:
        n = int(signature.weights[0].shape[0])
        by_name = {a.name: a for a in self._arguments(signature, with_partial=True)}
        arguments = [by_name[name] for name in ("partial", "bias", "out", "counts", "out_row")]
        block = min(_REDUCE_BLOCK, power_of_two(n))
        constants = {
            "COUNT": count_index(signature), "N": n, "SPLITS": self.tile.splits, "BLOCK": block,
            "HAS_BIAS": len(signature.weights) > 1,
        }  # fmt: skip
        grid = (GridDim(1), GridDim(0, ceil_div(n, block)))
        return launch("linear.triton:reduce_splits", arguments, constants, grid)


class TiledLinear(_Linear):
    """`tiled`: one tile a block, pointers; every SM."""

    def __init__(self, tile: Tile, dtype: str) -> None:
        super().__init__("tiled", tile)
        self._dtype = dtype

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if signature.inputs[0].dtype != self._dtype:
            return f"the tile is meant for {self._dtype}"
        element_bytes = 4 if self._dtype == "float32" else 2
        return self._too_large(target, 0, element_bytes) or super().unsupported(signature, target)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        tile, n = self.tile, int(signature.weights[0].shape[0])
        constants = {**self._constants(signature), "BLOCK_M": tile.t, "GROUP_M": tile.group_m}
        grid = (GridDim(tile.t, ceil_div(n, tile.n)),)
        arguments = self._arguments(signature, with_partial=False)
        return (launch("linear.triton_gemm:tiled", arguments, constants, grid, tile.warps, tile.stages),)


class PersistentLinear(_Linear):
    """`persistent`: one block a multiprocessor, tiles through the copy engine; SM 90 and above."""

    flop_per_us = 5.0e6

    def __init__(self, tile: Tile) -> None:
        super().__init__("tma", tile)

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if target.sm < 90:
            return f"SM {target.sm} has no bulk tensor copy engine"
        if signature.inputs[0].dtype != "bfloat16":
            return "float32 products run on the ordinary units"
        if (k := int(signature.inputs[0].shape[-1])) % 8:
            return f"rows of {k} elements are no multiple of 16 bytes"
        out_bytes = 2 * self.tile.t * self.tile.n // self.tile.subtiles
        return self._too_large(target, out_bytes, 2) or super().unsupported(signature, target)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        tile, n = self.tile, int(signature.weights[0].shape[0])
        constants = {
            **self._constants(signature), "BLOCK_M": tile.t, "GROUP_M": tile.group_m,
            "SUBTILES": tile.subtiles,
        }  # fmt: skip
        blocks = min(target.sm_count, ceil_div(rows, tile.t) * ceil_div(n, tile.n))
        arguments = self._arguments(signature, with_partial=False)
        return (
            launch(
                "linear.triton_gemm:persistent", arguments, constants, (GridDim(0, blocks),),
                tile.warps, tile.stages,
            ),
        )  # fmt: skip


TACTICS: tuple[CudaTactic, ...] = (
    StreamingLinear(Tile(t=64, n=32, k=64)),
    StreamingLinear(Tile(n=4, k=1024)),
    StreamingLinear(Tile(n=8, k=512)),
    StreamingLinear(Tile(n=2, k=2048)),
    StreamingLinear(Tile(n=4, k=512, warps=2)),
    StreamingLinear(Tile(n=4, k=1024, splits=4)),
    StreamingLinear(Tile(t=64, n=16, k=256)),
    StreamingLinear(Tile(t=64, n=64, k=128, stages=4)),
    StreamingLinear(Tile(t=64, n=32, k=128, stages=4, splits=4)),
    StreamingLinear(Tile(t=64, n=64, k=128, stages=4, splits=4)),
    TiledLinear(Tile(t=64, n=64, k=32, group_m=8), "float32"),
    TiledLinear(Tile(t=64, n=64, k=64, group_m=8), "bfloat16"),
    TiledLinear(Tile(t=128, n=128, k=64, warps=8), "bfloat16"),
    PersistentLinear(Tile(t=128, n=256, k=64, warps=8, stages=3)),
    PersistentLinear(Tile(t=128, n=128, k=64, warps=8, stages=4)),
    PersistentLinear(Tile(t=64, n=256, k=64, warps=4, stages=4)),
    PersistentLinear(Tile(t=64, n=128, k=64, warps=4, stages=3)),  # what SM 120 has room for
)
