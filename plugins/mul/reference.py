"""Torch reference of mul and its registration as `tapeout::mul`."""

from __future__ import annotations

import torch

from tapeout.plugins.mul import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


def _fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape)


register_torch_op(SCHEMA, mul, _fake)
reference = mul
