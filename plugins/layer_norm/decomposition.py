"""How Hugging Face models spell layer normalisation where they do not call torch's."""

from __future__ import annotations

import torch


def cohere(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
    y = x.to(torch.float32)
    mean = y.mean(-1, keepdim=True)
    variance = (y - mean).pow(2).mean(-1, keepdim=True)
    y = (y - mean) * torch.rsqrt(variance + eps)
    return ((weight.to(torch.float32) * y).to(x.dtype),)
