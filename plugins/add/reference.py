"""Torch reference of add and its registration as `tapeout::add`."""

from __future__ import annotations

import torch

from tapeout.plugins.add import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def _fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape)


register_torch_op(SCHEMA, add, _fake)
reference = add
