"""Torch reference of add_rms_norm and its registration as `tapeout::add_rms_norm`."""

from __future__ import annotations

import torch

from tapeout.plugins.add_rms_norm import SCHEMA
from tapeout.plugins.rms_norm.reference import rms_norm
from tapeout.plugins.torch_op import register_torch_op


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps, weight_offset, cast_before_weight), total


def _fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


register_torch_op(SCHEMA, add_rms_norm, _fake)
reference = add_rms_norm
