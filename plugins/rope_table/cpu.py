"""CPU tactics of rope_table."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic
from tapeout.plugins.native.tactic import NativeTactic, as_rows, dtype_code


class NativeRopeTable(NativeTactic):
    """C kernel over rows; see rope_table.c."""

    op = "rope_table"

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (positions,), (out,) = call.inputs, call.outputs
        inv_freq = call.weights[0]
        as_rows(positions, "rope_table positions")  # must be contiguous
        return self.library(call).bind(
            "rope_table", positions, positions.element_size(), inv_freq, out, out.stride(0),
            positions.shape[0], inv_freq.shape[0], dtype_code(out), float(call.attrs["scaling"]),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("rope_table"), NativeRopeTable())
