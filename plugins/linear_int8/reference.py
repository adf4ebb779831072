"""Torch reference of linear_int8 and its registration as `tapeout::linear_int8`."""

from __future__ import annotations

import torch

from tapeout.plugins.linear_int8 import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> int8 values [..., K] and float32 scales [..., 1]; see the schema, step 1."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    quantized = torch.where(scale > 0, torch.round(x / scale), 0.0)
    finite = torch.isfinite(scale)
    quantized = torch.where(finite, quantized, 0.0).to(torch.int8)
    return quantized, torch.where(finite, scale, torch.nan)


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    quantized, row_scale = quantize_rows(x)
    # float64 holds every sum of K int8 products exactly up to K = 2**39.
    sums = quantized.double() @ weight.double().t()
    out = sums.float() * row_scale * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


register_torch_op(SCHEMA, linear_int8, _fake)
reference = linear_int8
