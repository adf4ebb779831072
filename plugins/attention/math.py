"""Masked attention in plain torch: the definition both attention ops share."""

from __future__ import annotations

import torch


def visible_keys(q_positions: torch.Tensor, k_positions: torch.Tensor, window: int) -> torch.Tensor:
    """Bool [..., Q, K]: key position in (p - window, p] of the query's position p; window 0 = all."""
    distance = q_positions[..., :, None] - k_positions[..., None, :]
    visible = distance >= 0
    return visible & (distance < window) if window > 0 else visible


def alibi_bias(slopes: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor) -> torch.Tensor:
    """[Hq, Q, K] float32: slope * (key position - query position)."""
    distance = (k_positions[None, :] - q_positions[:, None]).float()
    return slopes.float()[:, None, None] * distance


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [Q, Hq, D], k and v [K, Hkv, D], visible bool [Q, K], sinks [Hq] -> [Q, Hq, D] in q's dtype.

    `bias` [Hq, Q, K] float32 is added to the scores. Computed in float32. Every query must see a key.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", probabilities, values).to(q.dtype)
