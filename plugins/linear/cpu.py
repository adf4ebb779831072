"""CPU tactics of linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import NativeTactic, dtype_code
from tapeout.plugins.op import AttrValue

#: Row count oneDNN is told to lay weights out for; it serves others as well.
_ONEDNN_PLANNED_ROWS = 8


def _weight_and_bias(weights: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, bias = (*weights, None)[:2]
    assert weight is not None
    return weight, bias


class AtenLinear(CpuTactic):
    """torch.mm or torch.addmm into the output view."""

    op = "linear"
    name = "aten"

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x,), (out,) = call.inputs, call.outputs
        weight, bias = _weight_and_bias(call.weights)
        transposed = weight.t()
        if bias is None:
            return lambda: torch.mm(x, transposed, out=out)
        return lambda: torch.addmm(bias, x, transposed, out=out)


class OneDnnLinear(CpuTactic):
    """oneDNN with weights reordered once at load."""

    op = "linear"
    name = "onednn"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        dtype = signature.inputs[0].dtype
        if not torch.backends.mkldnn.is_available():
            return "this torch has no oneDNN"
        if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "oneDNN has no bfloat16 matrix product for this CPU"
        if dtype not in ("float32", "bfloat16"):
            return f"not used for {dtype}"
        return None

    def prepare(self, weights: Sequence[torch.Tensor | None], attrs: Mapping[str, AttrValue]) -> Any:
        weight, bias = _weight_and_bias(weights)
        # The reorder wants a dense tensor; a mapped one may be a view into a larger file.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ONEDNN_PLANNED_ROWS)
        return packed, bias

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x,), (out,) = call.inputs, call.outputs
        packed, bias = call.weights
        product = torch.ops.mkldnn._linear_pointwise.default

        def run() -> None:
            out.copy_(product(x, packed, bias, "none", [], ""))

        return run


class NativeLinear(NativeTactic):
    """C kernel that streams the weights once for few rows; see linear.c."""

    op = "linear"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        dtypes = {t.dtype for t in (*signature.inputs, *signature.weights, *signature.outputs)}
        if len(dtypes) > 1:
            return f"mixed dtypes {', '.join(sorted(dtypes))}"
        return super().unsupported(signature, host)

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x,), (out,) = call.inputs, call.outputs
        weight, bias = _weight_and_bias(call.weights)
        return self.library(call).bind(
            "linear", x, x.stride(0), weight, weight.stride(0), bias, out, out.stride(0),
            x.shape[0], weight.shape[0], weight.shape[1], dtype_code(x),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenLinear(), OneDnnLinear(), NativeLinear())
