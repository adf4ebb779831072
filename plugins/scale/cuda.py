"""CUDA tactics of scale."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic
from tapeout.plugins.triton_aot.elementwise_tactic import Elementwise

TACTICS: tuple[CudaTactic, ...] = (
    Elementwise("scale", "triton_aot.elementwise:scale", scalars={"factor": "factor"}),
)
