"""CUDA tactics of gated_activation."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import CudaTactic, CudaTarget
from tapeout.plugins.triton_aot.elementwise_tactic import Elementwise


class GatedActivation(Elementwise):
    """Rows of two dimensions only: gate and up are halves of one row."""

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if len(signature.inputs[0].shape) != 2:
            return f"x has shape {list(signature.inputs[0].shape)}, expected [T, 2 I]"
        return super().unsupported(signature, target)


TACTICS: tuple[CudaTactic, ...] = (
    GatedActivation(
        "gated_activation", "gated_activation.triton:gated_activation", attr_constants={"KIND": "activation"}
    ),
)
