"""What all CUDA tactics of linear share: tiles, arguments, the workspace, the launches around the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTarget, GridDim, LaunchSpec
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
MIN_DOT = 16
BARRIER_BYTES = 2048
#: Rough rates of a large device and one of its multiprocessors, for expected_us alone.
BYTES_PER_US, FLOAT32_FLOP_PER_US, LAUNCH_US = 3.0e6, 0.2e6, 1.5
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
        text += f"_group{self.group_m}" if self.group_m != 8 else ""
        text += f"_ahead{self.ahead}" if self.ahead else ""
        return f"{text}_w{self.warps}s{self.stages}"


class LinearFamily(TritonTactic):
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
        stream_us = passes * n * k * (4 if wide else 2) / (BYTES_PER_US * busy * share)
        rate = FLOAT32_FLOP_PER_US if wide or tile.t == 1 else self.flop_per_us
        rate *= tile.t * tile.n / (tile.t * tile.n + 4096)  # large tiles reuse more of what they load
        depth = ceil_div(k, tile.splits)
        compute_us = ceil_div(blocks, target.sm_count) * 2.0 * self._block_rows(rows) * tile.n * depth / rate
        launches = 1 + (tile.splits > 1) + self._norms_apart(parts)
        return max(stream_us, compute_us if tile.t > 1 else 0.0) + LAUNCH_US * launches

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
            **epilogue_constants(parts),
        }  # fmt: skip
        grid = (GridDim(1), GridDim(0, ceil_div(parts.n, block)))
        arguments = self._arguments(signature, parts, REDUCED)
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
        needed = tile.stages * (tile.t + tile.n) * tile.k * element_bytes + out_bytes + BARRIER_BYTES
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
            Argument("weight_offset", "fp32", Arg("f32", value=weight_offset(signature))),
            Argument("x_row", "i32", x_row),
            Argument("residual_row", "i32", Arg("input_stride", residual, value=0)),
            Argument("out_row", "i32", Arg("output_stride", 0, value=0)),
        ]
        by_name = {a.name: a for a in known}
        return [by_name[name] for name in names]

    def _constants(self, signature: OpSignature, parts: LinearParts) -> dict[str, Any]:
        return {
            "COUNT": count_index(signature), "N": parts.n, "K": parts.k, "BLOCK_N": self._block_n(parts),
            "BLOCK_K": self.tile.k, **epilogue_constants(parts),
        }  # fmt: skip


def weight_offset(signature: OpSignature) -> float:
    return float(signature.attrs.get("weight_offset", 0.0))


def epilogue_constants(parts: LinearParts) -> dict[str, Any]:
    return {
        "HAS_BIAS": parts.bias is not None, "ACTIVATION": parts.activation,
        "HAS_RESIDUAL": parts.residual is not None,
    }  # fmt: skip


def no_copy_engine(signature: OpSignature, target: CudaTarget) -> str | None:
    """Why tiles cannot come through the copy engine."""
    if target.sm < 90:
        return f"SM {target.sm} has no bulk tensor copy engine"
    if signature.inputs[0].dtype != "bfloat16":
        return "float32 products run on the ordinary units"
    # Tiles leave in units of 16 bytes as well: it would write beyond the last output.
    for shape in (signature.inputs[0].shape, signature.outputs[0].shape):
        if (columns := int(shape[-1])) % 8:
            return f"rows of {columns} elements are no multiple of 16 bytes"
    return None


REDUCED = ("partial", "bias", "residual", "out", "counts", "residual_row", "out_row")
OPERANDS = (
    "x", "weight", "bias", "residual", "out", "partial", "counts", "x_row", "residual_row", "out_row",
)  # fmt: skip
