"""CPU tactics of mul_weight."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import DTYPE_CODES, NativeTactic, as_rows, dtype_code


class NativeMulWeight(NativeTactic):
    """C kernel over rows; see mul_weight.c."""

    op = "mul_weight"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        if signature.weights[0].dtype not in DTYPE_CODES:
            return f"no native kernel for a weight of {signature.weights[0].dtype}"
        return super().unsupported(signature, host)

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x,), (weight,), (out,) = call.inputs, call.weights, call.outputs
        rows, to = as_rows(x, "mul_weight x"), as_rows(out, "mul_weight out")
        return self.library(call).bind(
            "mul_weight", x, rows.row_stride, rows.group_stride, weight, int(weight.shape[0] > 1),
            dtype_code(weight), out, to.row_stride, to.group_stride, rows.rows, rows.groups, rows.dim,
            dtype_code(x),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("mul_weight", batch_invariant=True), NativeMulWeight())
