"""CUDA tactics of moe_router."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic

TACTICS: tuple[CudaTactic, ...] = ()
