"""The native tactic of the elementwise ops, which share elementwise.c."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.activation.codes import activation_code
from tapeout.plugins.cpu import BoundCall
from tapeout.plugins.native.tactic import NativeTactic, as_rows, dtype_code

_CODES = {"add": 0, "mul": 1, "scale": 2}
_ACTIVATION = 16


class NativeElementwise(NativeTactic):
    """add, mul, scale or activation."""

    def __init__(self, op_name: str) -> None:
        self.op = op_name

    def bind(self, call: BoundCall) -> Callable[[], None]:
        a, b = (*call.inputs, None)[:2]
        (out,) = call.outputs
        left, to = as_rows(a, f"{self.op} input"), as_rows(out, f"{self.op} out")
        right = as_rows(b, f"{self.op} b") if b is not None else left
        code = (
            _CODES[self.op] if self.op in _CODES else _ACTIVATION + activation_code(str(call.attrs["kind"]))
        )
        return self.library(call).bind(
            "elementwise", a, left.row_stride, left.group_stride, b, right.row_stride, right.group_stride,
            out, to.row_stride, to.group_stride, to.rows, to.groups, to.dim, dtype_code(out), code,
            float(call.attrs.get("factor", 1.0)),
        )  # fmt: skip
