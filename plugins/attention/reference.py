"""Torch reference of attention and its registration as `tapeout::attention`."""

from __future__ import annotations

import torch

from tapeout.plugins.attention import SCHEMA
from tapeout.plugins.attention.math import alibi_bias, masked_attention, visible_keys
from tapeout.plugins.torch_op import register_torch_op


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    alibi: bool,
) -> torch.Tensor:
    rows, keys, values = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
    flat = positions.reshape(-1)
    if rows.shape[0] == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = torch.ones_like(flat, dtype=torch.bool)
    starts[1:] = flat[1:] != flat[:-1] + 1
    sequence = starts.cumsum(0)
    visible = visible_keys(flat, flat, window) & (sequence[:, None] == sequence[None, :])
    bias = None if slopes is None else alibi_bias(slopes, flat, flat)
    return masked_attention(rows, keys, values, visible, sinks, scale, softcap, bias).reshape(q.shape)


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    alibi: bool,
) -> torch.Tensor:
    return q.new_empty(q.shape)


register_torch_op(SCHEMA, attention, _fake)
reference = attention
