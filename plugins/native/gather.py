"""The native tactics of the ops that move rows: embedding, select_rows and copy (gather.c)."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.cpu import BoundCall, HostCpu, OpSignature
from tapeout.plugins.native.tactic import NativeTactic, as_rows


class NativeGather(NativeTactic):
    """embedding or select_rows: rows of any dtype, picked by id."""

    def __init__(self, op_name: str) -> None:
        self.op = op_name

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        return None

    def bind(self, call: BoundCall) -> Callable[[], None]:
        table, ids = (call.weights[0], call.inputs[0]) if self.op == "embedding" else call.inputs
        (out,) = call.outputs
        source, to = as_rows(table, f"{self.op} table"), as_rows(out, f"{self.op} out")
        as_rows(ids, f"{self.op} ids")  # must be contiguous
        size = out.element_size()
        return self.library(call).bind(
            "gather", table, source.row_stride * size, source.rows, ids, ids.element_size(),
            out, to.row_stride * size, ids.shape[0], source.dim * size,
        )  # fmt: skip


class NativeCopy(NativeTactic):
    """copy of rows x groups x dim, any dtype."""

    op = "copy"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        return None

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x,), (out,) = call.inputs, call.outputs
        if (x.shape[-1] > 1 and x.stride(-1) != 1) or x.dim() > 3:
            # Rare layouts (a transposed view) are left to torch, which copies the same bytes.
            return lambda: out.copy_(x)
        source, to, size = as_rows(x, "copy x"), as_rows(out, "copy out"), x.element_size()
        return self.library(call).bind(
            "copy", x, source.row_stride * size, source.group_stride * size, out, to.row_stride * size,
            to.group_stride * size, source.rows, source.groups, source.dim * size,
        )  # fmt: skip
