"""How Hugging Face models spell RMSNorm. Each function is one spelling; `VARIANTS` lists them
with the attributes of the fused op they equal."""

from __future__ import annotations

import torch


def llama(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype),)


def olmo2(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return ((weight * y).to(x.dtype),)


def gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return ((y * (1.0 + weight.float())).type_as(x),)


def gemma4(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
    y = x.float()
    y = y * torch.pow(y.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return ((y * weight.float()).type_as(x),)


def plain(x: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
    """Without a weight."""
    y = x.float()
    return ((y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).type_as(x),)


def plain_pow(x: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
    """Without a weight."""
    y = x.float()
    return ((y * torch.pow(y.pow(2).mean(-1, keepdim=True) + eps, -0.5)).type_as(x),)


# (spelling, weight_offset, cast_before_weight); in float32 the first two are the same graph.
VARIANTS = ((llama, 0.0, True), (olmo2, 0.0, False), (gemma, 1.0, False), (gemma4, 0.0, False))
#: Without a weight; they match what is inside of the others.
PLAIN = (plain, plain_pow)
