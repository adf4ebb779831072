"""CUDA tactics of add."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic
from tapeout.plugins.triton_aot.elementwise_tactic import Elementwise

TACTICS: tuple[CudaTactic, ...] = (
    Elementwise("add", "triton_aot.elementwise:binary", names=("a", "b"), constants={"OP": "add"}),
)
