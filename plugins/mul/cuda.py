"""CUDA tactics of mul."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic
from tapeout.plugins.triton_aot.elementwise_tactic import Elementwise

TACTICS: tuple[CudaTactic, ...] = (
    Elementwise("mul", "triton_aot.elementwise:binary", names=("a", "b"), constants={"OP": "mul"}),
)
