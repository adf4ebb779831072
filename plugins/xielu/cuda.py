"""CUDA tactics of xielu."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic
from tapeout.plugins.triton_aot.elementwise_tactic import Elementwise

TACTICS: tuple[CudaTactic, ...] = (
    Elementwise("xielu", "xielu.triton:xielu", weights=("alpha_p", "alpha_n", "beta", "eps")),
)
