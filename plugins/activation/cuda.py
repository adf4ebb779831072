"""CUDA tactics of activation."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic
from tapeout.plugins.triton_aot.elementwise_tactic import Elementwise

TACTICS: tuple[CudaTactic, ...] = (
    Elementwise("activation", "activation.triton:activation", attr_constants={"KIND": "kind"}),
)
