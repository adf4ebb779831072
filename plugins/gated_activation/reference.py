"""Torch reference of gated_activation and its registration as `tapeout::gated_activation`."""

from __future__ import annotations

import torch

from tapeout.plugins.activation.functions import function
from tapeout.plugins.gated_activation import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return function(activation)(gate) * up


def _fake(x: torch.Tensor, activation: str) -> torch.Tensor:
    function(activation)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


register_torch_op(SCHEMA, gated_activation, _fake)
reference = gated_activation
