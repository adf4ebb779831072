"""CPU tactics of linear_int8."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tapeout.plugins.cpu import BoundCall, CpuTactic
from tapeout.plugins.linear_int8.reference import quantize_rows
from tapeout.plugins.native.tactic import NativeTactic, dtype_code


class AtenLinearInt8(CpuTactic):
    """Quantize with torch, multiply with torch._int_mm (exact int32 sums)."""

    op = "linear_int8"
    name = "aten"
    batch_invariant = True  # sums are exact, the rest is elementwise

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x,), (out,) = call.inputs, call.outputs
        weight, scale, bias = (*call.weights, None)[:3]
        transposed = weight.t()

        def run() -> None:
            quantized, row_scale = quantize_rows(x)
            result = torch._int_mm(quantized, transposed).float() * row_scale * scale
            out.copy_(result if bias is None else result + bias.float())

        return run


class NativeLinearInt8(NativeTactic):
    """C kernel that streams the weights once for few rows; see linear_int8.c."""

    op = "linear_int8"

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x,), (out,) = call.inputs, call.outputs
        weight, scale, bias = (*call.weights, None)[:3]
        return self.library(call).bind(
            "linear_int8", x, x.stride(0), weight, weight.stride(0), scale, bias, out, out.stride(0),
            x.shape[0], weight.shape[0], weight.shape[1], dtype_code(x),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenLinearInt8(), NativeLinearInt8())
