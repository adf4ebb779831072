"""How Hugging Face models compute cosines and sines from positions and inverse frequencies."""

from __future__ import annotations

import torch


def cos(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor]:
    """positions [1, T], inv_freq [D / 2] -> [1, T, D]."""
    freqs = positions[..., None].float() * inv_freq
    return ((torch.cat((freqs, freqs), dim=-1).cos() * scaling).to(dtype),)


def sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor]:
    """positions [1, T], inv_freq [D / 2] -> [1, T, D]."""
    freqs = positions[..., None].float() * inv_freq
    return ((torch.cat((freqs, freqs), dim=-1).sin() * scaling).to(dtype),)
