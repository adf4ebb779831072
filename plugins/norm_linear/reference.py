"""Torch reference of norm_linear and its registration as `tapeout::norm_linear`."""

from __future__ import annotations

import torch

from tapeout.plugins.activation.functions import function
from tapeout.plugins.gated_activation.reference import gated_activation
from tapeout.plugins.linear.reference import linear
from tapeout.plugins.norm_linear import SCHEMA
from tapeout.plugins.rms_norm.reference import rms_norm
from tapeout.plugins.torch_op import register_torch_op


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
    activation: str,
) -> torch.Tensor:
    normed = rms_norm(x, norm_weight, eps, weight_offset, cast_before_weight)
    product = linear(normed, weight, bias)
    return gated_activation(product, activation) if activation else product


def _fake(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
    activation: str,
) -> torch.Tensor:
    if activation:
        function(activation)
    columns = weight.shape[0]
    return x.new_empty((*x.shape[:-1], columns // 2 if activation else columns))


register_torch_op(SCHEMA, norm_linear, _fake)
reference = norm_linear
