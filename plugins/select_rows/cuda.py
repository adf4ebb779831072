"""CUDA tactics of select_rows."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.triton_aot.elementwise_tactic import block_of
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    TritonTactic,
    ceil_div,
    count_index,
    launch,
    pointer,
    step,
)


class SelectRows(TritonTactic):
    op = "select_rows"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if len(signature.inputs[0].shape) != 2:
            return f"x has shape {list(signature.inputs[0].shape)}, expected [T, H]"
        return super().unsupported(signature, target)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        x, out = signature.inputs[0], signature.outputs[0]
        width = int(x.shape[1])
        block, warps = block_of(width)
        arguments = [
            pointer("ids", "int32", Arg("input", 1)),
            pointer("table", x.dtype, Arg("input", 0)),
            pointer("out", out.dtype, Arg("output", 0)),
            step("counts"),
            Argument("table_row", "i32", Arg("input_stride", 0, value=0)),
            Argument("out_row", "i32", Arg("output_stride", 0, value=0)),
        ]
        constants = {"COUNT": count_index(signature), "DIM": width, "BLOCK": block}
        grid = (GridDim(1), GridDim(0, ceil_div(width, block)))
        return (launch("triton_aot.elementwise:gather", arguments, constants, grid, warps),)


TACTICS: tuple[CudaTactic, ...] = (SelectRows(),)
