"""CUDA tactics of copy."""

from __future__ import annotations

import math

from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.triton_aot.elementwise_tactic import Elementwise, block_of
from tapeout.plugins.triton_aot.tactic import Argument, ceil_div, count_index, launch, pointer, step


class Copy(Elementwise):
    """Of any view: alone among the ops it reads rows whose elements are not side by side, and rows of groups
    of groups."""

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        x = signature.inputs[0]
        if len(x.shape) == 4:  # read and written an element at a time: only rows must be aligned
            flat = TensorType(x.dtype, (x.shape[0], math.prod(map(int, x.shape[1:]))))
            signature = OpSignature("copy", (flat,), (), (flat,), signature.attrs)
        return super().unsupported(signature, target)

    def strides(self, signature: OpSignature) -> list[Argument]:
        innermost = Arg("input_stride", 0, value=len(signature.inputs[0].shape) - 1)
        return [*super().strides(signature), Argument("x_step", "i32", innermost, aligned=False)]

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        x, out = signature.inputs[0], signature.outputs[0]
        if len(x.shape) < 4:
            return super().launches(signature, rows, target)
        groups, items, dim = (int(d) for d in x.shape[1:])
        block, warps = block_of(groups * items * dim)
        arguments = [
            pointer("x", x.dtype, Arg("input", 0)),
            pointer("out", out.dtype, Arg("output", 0)),
            step("counts"),
            *(
                Argument(f"{name}_{part}", "i32", Arg(f"{role}_stride", 0, value=i), aligned=i == 0)
                for name, role in (("x", "input"), ("out", "output"))
                for i, part in enumerate(("row", "group", "item"))
            ),
            Argument("x_step", "i32", Arg("input_stride", 0, value=3), aligned=False),
        ]
        constants = {
            "COUNT": count_index(signature), "GROUPS": groups, "ITEMS": items, "DIM": dim, "BLOCK": block,
        }  # fmt: skip
        grid = (GridDim(1), GridDim(0, ceil_div(groups * items * dim, block)))
        return (launch("triton_aot.elementwise:copy_nested", arguments, constants, grid, warps),)


TACTICS: tuple[CudaTactic, ...] = (Copy("copy", "triton_aot.elementwise:copy"),)
