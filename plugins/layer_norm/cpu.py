"""CPU tactics of layer_norm."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import DTYPE_CODES, NativeTactic, as_rows, dtype_code


class NativeLayerNorm(NativeTactic):
    """C kernel, one row of one group at a time; see layer_norm.c."""

    op = "layer_norm"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        x, weights = signature.inputs[0].dtype, {w.dtype for w in signature.weights}
        if len(weights) > 1:
            return "weight and bias have different dtypes"
        if not weights <= set(DTYPE_CODES) or (x == "float32" and weights != {"float32"}):
            return f"no native kernel for weight dtype {', '.join(weights)} and input dtype {x}"
        return super().unsupported(signature, host)

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x,), (out,) = call.inputs, call.outputs
        weight, bias = (*call.weights, None)[:2]
        rows, to = as_rows(x, "layer_norm x"), as_rows(out, "layer_norm out")
        return self.library(call).bind(
            "layer_norm", x, rows.row_stride, rows.group_stride, weight, bias, dtype_code(weight),
            out, to.row_stride, to.group_stride, rows.rows, rows.groups, rows.dim, dtype_code(x),
            float(call.attrs["eps"]),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("layer_norm"), NativeLayerNorm())
