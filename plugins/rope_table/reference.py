"""Torch reference of rope_table and its registration as `tapeout::rope_table`."""

from __future__ import annotations

import torch

from tapeout.plugins.rope_table import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def rope_table(positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: str) -> torch.Tensor:
    angles = positions.float()[..., None] * inv_freq.float()
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * scaling).to(getattr(torch, dtype))


def _fake(positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: str) -> torch.Tensor:
    shape = (*positions.shape, 2 * inv_freq.shape[0])
    return torch.empty(shape, dtype=getattr(torch, dtype), device=inv_freq.device)


register_torch_op(SCHEMA, rope_table, _fake)
reference = rope_table
