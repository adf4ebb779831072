"""CUDA tactics of embedding."""

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


class Embedding(TritonTactic):
    op = "embedding"

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        weight, out = signature.weights[0], signature.outputs[0]
        width = int(weight.shape[1])
        block, warps = block_of(width)
        arguments = [
            pointer("ids", "int32", Arg("input", 0)),
            pointer("table", weight.dtype, Arg("weight", 0)),
            pointer("out", out.dtype, Arg("output", 0)),
            step("counts"),
            Argument("table_row", "i32", Arg("i32", value=width)),
            Argument("out_row", "i32", Arg("output_stride", 0, value=0)),
        ]
        constants = {"COUNT": count_index(signature), "DIM": width, "BLOCK": block}
        grid = (GridDim(1), GridDim(0, ceil_div(width, block)))
        return (launch("triton_aot.elementwise:gather", arguments, constants, grid, warps),)


TACTICS: tuple[CudaTactic, ...] = (Embedding(),)
