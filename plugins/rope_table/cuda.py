"""CUDA tactics of rope_table."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    TritonTactic,
    count_index,
    launch,
    pointer,
    power_of_two,
    step,
)


class RopeTable(TritonTactic):
    op = "rope_table"

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        out, half = signature.outputs[0], int(signature.weights[0].shape[0])
        arguments = [
            pointer("positions", "int32", Arg("input", 0)),
            pointer("inv_freq", "float32", Arg("weight", 0)),
            pointer("out", out.dtype, Arg("output", 0)),
            step("counts"),
            Argument("scaling", "fp32", Arg("f32", value=float(signature.attrs["scaling"]))),
            Argument("out_row", "i32", Arg("output_stride", 0, value=0)),
        ]
        constants = {"COUNT": count_index(signature), "HALF": half, "BLOCK": power_of_two(half)}
        return (launch("rope_table.triton:rope_table", arguments, constants, (GridDim(1),), 1),)


TACTICS: tuple[CudaTactic, ...] = (RopeTable(),)
