"""CUDA tactics of copy."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic
from tapeout.plugins.triton_aot.elementwise_tactic import Elementwise

TACTICS: tuple[CudaTactic, ...] = (Elementwise("copy", "triton_aot.elementwise:copy"),)
