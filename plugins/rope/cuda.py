"""CUDA tactics of rope."""

from __future__ import annotations

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
    strides,
)

_BLOCK = 512  # pairs a block turns


class Rope(TritonTactic):
    """One block per row and a few heads."""

    op = "rope"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if len(signature.inputs[0].shape) != 3:
            return f"x has shape {list(signature.inputs[0].shape)}, expected [T, H, D]"
        return super().unsupported(signature, target)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        x, table, out = *signature.inputs, signature.outputs[0]
        heads, dim, half = int(x.shape[1]), int(x.shape[2]), int(table.shape[1]) // 2
        half_block = power_of_two(max(half, dim - 2 * half))
        heads_block = min(power_of_two(heads), max(1, _BLOCK // half_block))
        arguments = [
            pointer("x", x.dtype, Arg("input", 0)),
            pointer("table", table.dtype, Arg("input", 1)),
            pointer("out", out.dtype, Arg("output", 0)),
            step("counts"),
            *strides("x", x, "input", 0),
            Argument("table_row", "i32", Arg("input_stride", 1, value=0)),
            *strides("out", out, "output", 0),
        ]
        constants = {
            "COUNT": count_index(signature), "HEADS": heads, "DIM": dim, "HALF": half,
            "HEADS_BLOCK": heads_block, "HALF_BLOCK": half_block,
            "INTERLEAVED": bool(signature.attrs["interleaved"]),
        }  # fmt: skip
        grid = (GridDim(1), GridDim(0, ceil_div(heads, heads_block)))
        warps = max(1, heads_block * half_block // 128)
        # Without fusion: the assembler would turn the last product and the sum into one fused
        # multiply-add of bfloat16 and so skip a rounding that Hugging Face's models do.
        return (launch("rope.triton:rope", arguments, constants, grid, warps, fp_fusion=False),)


TACTICS: tuple[CudaTactic, ...] = (Rope(),)
