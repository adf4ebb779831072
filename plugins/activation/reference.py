"""Torch reference of activation and its registration as `tapeout::activation`."""

from __future__ import annotations

import torch

from tapeout.plugins.activation import SCHEMA
from tapeout.plugins.activation.functions import function
from tapeout.plugins.torch_op import register_torch_op


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    return function(kind)(x)


def _fake(x: torch.Tensor, kind: str) -> torch.Tensor:
    function(kind)
    return x.new_empty(x.shape)


register_torch_op(SCHEMA, activation, _fake)
reference = activation
