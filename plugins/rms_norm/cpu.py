"""CPU tactics of rms_norm, and the native one of add_rms_norm, which shares the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import DTYPE_CODES, NativeTactic, as_rows, dtype_code

if TYPE_CHECKING:
    import torch


class NativeRmsNorm(NativeTactic):
    """C kernel of rms_norm and add_rms_norm; see rms_norm.c."""

    def __init__(self, op_name: str) -> None:
        self.op = op_name

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        x, weight = signature.inputs[0].dtype, signature.weights[0].dtype
        if weight not in DTYPE_CODES or (x == "float32" and weight != "float32"):
            return f"no native kernel for weight dtype {weight} and input dtype {x}"
        return super().unsupported(signature, host)

    def bind(self, call: BoundCall) -> Callable[[], None]:
        x, residual = (*call.inputs, None)[:2]
        out, total = (*call.outputs, None)[:2]
        weight = call.weights[0]
        rows = as_rows(x, f"{self.op} x")

        def view(tensor: torch.Tensor | None, what: str) -> tuple[torch.Tensor | None, int, int]:
            if tensor is None:
                return None, 0, 0
            described = as_rows(tensor, f"{self.op} {what}")
            return tensor, described.row_stride, described.group_stride

        return self.library(call).bind(
            "rms_norm", *view(x, "x"), *view(residual, "residual"), weight, dtype_code(weight),
            *view(out, "out"), *view(total, "sum"), rows.rows, rows.groups, rows.dim, dtype_code(x),
            int(call.attrs["cast_before_weight"]), float(call.attrs["eps"]),
            float(call.attrs["weight_offset"]),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("rms_norm"), NativeRmsNorm("rms_norm"))
