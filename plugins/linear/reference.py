"""Torch reference of linear and its registration as `tapeout::linear`."""

from __future__ import annotations

import torch

from tapeout.plugins.linear import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


register_torch_op(SCHEMA, linear, _fake)
reference = linear
