"""CUDA tactics of linear_add: those of linear, whose kernels do the rest on the way."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic
from tapeout.plugins.linear.cuda import linear_tactics

TACTICS: tuple[CudaTactic, ...] = linear_tactics("linear_add")
