"""Torch reference of mul_weight and its registration as `tapeout::mul_weight`."""

from __future__ import annotations

import torch

from tapeout.plugins.mul_weight import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def mul_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.float() * weight.float()).to(x.dtype)


def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


register_torch_op(SCHEMA, mul_weight, _fake)
reference = mul_weight
