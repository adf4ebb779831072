"""CPU tactics of moe_experts."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.activation.codes import ACTIVATION_CODES
from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import NativeTactic, as_rows, dtype_code

_CLAMPED = 100  # code of swiglu_clamped in moe_experts.c
_WEIGHT_DTYPES = ("float32", "bfloat16")


class NativeMoeExperts(NativeTactic):
    """C kernel over assignments sorted by expert; see moe_experts.c."""

    op = "moe_experts"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        x, ids, weights = signature.inputs
        if len(x.shape) != 2:
            return f"x has shape {list(x.shape)}, expected [T, H]"
        if ids.dtype not in ("int32", "int64") or weights.dtype != "float32":
            return f"expert ids are {ids.dtype} and weights {weights.dtype}, expected int32 and float32"
        if {w.dtype for w in signature.weights} != {x.dtype}:
            return "weights have another dtype than x"
        return None if x.dtype in _WEIGHT_DTYPES else f"no native kernel for {x.dtype}"

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x, ids, weights), (out,), attrs = call.inputs, call.outputs, call.attrs
        up, down, up_bias, down_bias = (*call.weights, None, None)[:4]
        ids_rows, weight_rows = as_rows(ids, "moe_experts ids"), as_rows(weights, "moe_experts weights")
        kind = str(attrs["activation"])
        code = _CLAMPED if kind == "swiglu_clamped" else ACTIVATION_CODES[kind]
        return self.library(call).bind(
            "moe_experts", x, as_rows(x, "moe_experts x").row_stride, ids, ids_rows.row_stride,
            ids.element_size(), weights, weight_rows.row_stride, up, down, up_bias, down_bias,
            out, as_rows(out, "moe_experts out").row_stride, x.shape[0], ids.shape[1], up.shape[0],
            x.shape[1], down.shape[2], int(bool(attrs["gated"])), code, dtype_code(x),
            float(attrs["alpha"]), float(attrs["limit"]),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("moe_experts"), NativeMoeExperts())
