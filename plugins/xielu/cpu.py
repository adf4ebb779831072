"""CPU tactics of xielu."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import NativeTactic, as_rows, dtype_code


class NativeXielu(NativeTactic):
    """C kernel over rows; see xielu.c."""

    op = "xielu"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        if {w.dtype for w in signature.weights} != {signature.inputs[0].dtype}:
            return "its numbers have another dtype than x"
        return super().unsupported(signature, host)

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x,), (out,) = call.inputs, call.outputs
        rows, to = as_rows(x, "xielu x"), as_rows(out, "xielu out")
        return self.library(call).bind(
            "xielu", x, rows.row_stride, rows.group_stride, *call.weights, out, to.row_stride,
            to.group_stride, rows.rows, rows.groups, rows.dim, dtype_code(x),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("xielu"), NativeXielu())
