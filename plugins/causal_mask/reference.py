"""Torch reference of causal_mask and its registration as `tapeout::causal_mask`."""

from __future__ import annotations

import torch

from tapeout.plugins.attention.math import visible_keys
from tapeout.plugins.causal_mask import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def causal_mask(positions: torch.Tensor, window: int, dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    flat = positions.reshape(-1)
    visible = visible_keys(flat, flat, window)[None, None]
    return torch.zeros(visible.shape, dtype=kind).masked_fill(~visible, torch.finfo(kind).min)


def _fake(positions: torch.Tensor, window: int, dtype: str) -> torch.Tensor:
    rows = positions.shape[-1]
    return positions.new_empty((1, 1, rows, rows), dtype=getattr(torch, dtype))


register_torch_op(SCHEMA, causal_mask, _fake)
reference = causal_mask
