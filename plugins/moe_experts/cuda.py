"""CUDA tactics of moe_experts."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic

TACTICS: tuple[CudaTactic, ...] = ()
