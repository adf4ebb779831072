"""CPU tactics of rope."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import NativeTactic, as_rows, dtype_code


class NativeRope(NativeTactic):
    """C kernel, one head at a time; see rope.c."""

    op = "rope"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        if signature.inputs[0].dtype != signature.inputs[1].dtype:
            return "the table has another dtype than x"
        return super().unsupported(signature, host)

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x, table), (out,) = call.inputs, call.outputs
        rows, to = as_rows(x, "rope x"), as_rows(out, "rope out")
        return self.library(call).bind(
            "rope", x, rows.row_stride, rows.group_stride, table, as_rows(table, "rope table").row_stride,
            out, to.row_stride, to.group_stride, rows.rows, rows.groups, rows.dim, table.shape[-1],
            int(call.attrs["interleaved"]), dtype_code(x),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("rope"), NativeRope())
