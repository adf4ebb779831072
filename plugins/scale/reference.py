"""Torch reference of scale and its registration as `tapeout::scale`."""

from __future__ import annotations

import torch

from tapeout.plugins.scale import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return (x.float() * factor).to(x.dtype)


def _fake(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.new_empty(x.shape)


register_torch_op(SCHEMA, scale, _fake)
reference = scale
