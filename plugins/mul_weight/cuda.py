"""CUDA tactics of mul_weight."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import CudaTactic
from tapeout.plugins.triton_aot.elementwise_tactic import Elementwise


class MulWeight(Elementwise):
    """By one number for each element of a group, or one for all."""

    def more_constants(self, signature: OpSignature) -> dict[str, int]:
        return {"WEIGHT_STEP": int(int(signature.weights[0].shape[0]) > 1)}


TACTICS: tuple[CudaTactic, ...] = (
    MulWeight("mul_weight", "mul_weight.triton:mul_weight", weights=("weight",)),
)
