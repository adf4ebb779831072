"""CPU tactics of gated_activation."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.activation.codes import activation_code
from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import NativeTactic, as_rows, dtype_code

_KERNELS = ("silu", "gelu", "gelu_tanh", "relu")


class NativeGatedActivation(NativeTactic):
    """C kernel over blocks of a row; see gated_activation.c."""

    op = "gated_activation"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        if signature.attrs["activation"] not in _KERNELS:
            return f"no native kernel for activation {signature.attrs['activation']!r}"
        return super().unsupported(signature, host)

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (x,), (out,) = call.inputs, call.outputs
        rows, to = as_rows(x, "gated_activation x"), as_rows(out, "gated_activation out")
        return self.library(call).bind(
            "gated_activation", x, rows.row_stride, out, to.row_stride, rows.rows, to.dim,
            dtype_code(x), activation_code(str(call.attrs["activation"])),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("gated_activation"), NativeGatedActivation())
