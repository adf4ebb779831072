"""Torch reference of latent_attention and its registration as `tapeout::latent_attention`."""

from __future__ import annotations

import torch

from tapeout.plugins.attention.math import visible_keys
from tapeout.plugins.latent_attention import SCHEMA
from tapeout.plugins.latent_attention.math import attend_latents
from tapeout.plugins.torch_op import register_torch_op


def latent_attention(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    latent: torch.Tensor,
    k_rot: torch.Tensor,
    positions: torch.Tensor,
    up_key: torch.Tensor,
    up_value: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    nope, rot = (t.reshape(-1, *t.shape[-2:]) for t in (q_nope, q_rot))
    keys, rotated = (t.reshape(-1, t.shape[-1]) for t in (latent, k_rot))
    flat = positions.reshape(-1)
    starts = torch.ones_like(flat, dtype=torch.bool)
    starts[1:] = flat[1:] != flat[:-1] + 1
    sequence = starts.cumsum(0)
    visible = visible_keys(flat, flat, window) & (sequence[:, None] == sequence[None, :])
    out = attend_latents(nope, rot, keys, rotated, up_key, up_value, visible, scale)
    return out.reshape(*q_nope.shape[:-1], up_value.shape[1])


def _fake(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    latent: torch.Tensor,
    k_rot: torch.Tensor,
    positions: torch.Tensor,
    up_key: torch.Tensor,
    up_value: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    return q_nope.new_empty((*q_nope.shape[:-1], up_value.shape[1]))


register_torch_op(SCHEMA, latent_attention, _fake)
reference = latent_attention
