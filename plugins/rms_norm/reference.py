"""Torch reference of rms_norm and its registration as `tapeout::rms_norm`."""

from __future__ import annotations

import torch

from tapeout.plugins.rms_norm import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, cast_before_weight: bool
) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        factor = weight if weight_offset == 0 else weight + weight_offset
        return normed.to(x.dtype) * factor.to(x.dtype)
    return (normed * (weight_offset + weight.float())).to(x.dtype)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, cast_before_weight: bool
) -> torch.Tensor:
    return x.new_empty(x.shape)


register_torch_op(SCHEMA, rms_norm, _fake)
reference = rms_norm
