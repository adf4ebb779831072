"""CUDA tactics of add_rms_norm."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic
from tapeout.plugins.rms_norm.cuda import RmsNorm

TACTICS: tuple[CudaTactic, ...] = (RmsNorm("add_rms_norm"),)
