"""CUDA tactics of copy."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic
from tapeout.plugins.triton_aot.elementwise_tactic import Elementwise
from tapeout.plugins.triton_aot.tactic import Argument


class Copy(Elementwise):
    """Of any view: alone among the ops it reads rows whose elements are not side by side."""

    def strides(self, signature: OpSignature) -> list[Argument]:
        innermost = Arg("input_stride", 0, value=len(signature.inputs[0].shape) - 1)
        return [*super().strides(signature), Argument("x_step", "i32", innermost, aligned=False)]


TACTICS: tuple[CudaTactic, ...] = (Copy("copy", "triton_aot.elementwise:copy"),)
