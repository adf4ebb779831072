"""CUDA tactics of paged_latent_attention."""

from __future__ import annotations

from tapeout.plugins.cuda import CudaTactic

TACTICS: tuple[CudaTactic, ...] = ()
