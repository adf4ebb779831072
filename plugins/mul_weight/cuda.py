"""CUDA tactics of mul_weight."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic

TACTICS: tuple[CudaTactic, ...] = ()
