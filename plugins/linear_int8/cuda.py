"""CUDA tactics of linear_int8: none yet, so an int8 build for a GPU is refused with that reason."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic

TACTICS: tuple[CudaTactic, ...] = ()
