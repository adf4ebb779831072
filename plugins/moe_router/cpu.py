"""CPU tactics of moe_router."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import NativeTactic, as_rows, dtype_code

#: scoring to its code in moe_router.c.
_SCORING = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2}
_MAX_EXPERTS = 1024  # MAX_EXPERTS of moe_router.c


class NativeMoeRouter(NativeTactic):
    """C kernel, one row at a time; see moe_router.c."""

    op = "moe_router"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        (logits,) = signature.inputs
        if len(logits.shape) != 2 or int(logits.shape[1]) > _MAX_EXPERTS:
            return f"logits have shape {list(logits.shape)}, expected [T, up to {_MAX_EXPERTS}]"
        if any(w.dtype != "float32" for w in signature.weights):
            return "the bias is not float32"
        return super().unsupported(signature, host)

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (logits,), (ids, weights), attrs = call.inputs, call.outputs, call.attrs
        bias = next((w for w in call.weights if w is not None), None)
        return self.library(call).bind(
            "moe_router", logits, as_rows(logits, "moe_router logits").row_stride, bias,
            ids, as_rows(ids, "moe_router ids").row_stride,
            weights, as_rows(weights, "moe_router weights").row_stride,
            logits.shape[0], logits.shape[1], int(attrs["chosen"]), _SCORING[str(attrs["scoring"])],
            int(attrs["groups"]), int(attrs["chosen_groups"]), int(attrs["group_by"] == "best_two"),
            int(bool(attrs["normalize"])), dtype_code(logits), float(attrs["scale"]),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("moe_router"), NativeMoeRouter())
