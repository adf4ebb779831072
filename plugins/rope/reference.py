"""Torch reference of rope and its registration as `tapeout::rope`."""

from __future__ import annotations

import torch

from tapeout.plugins.rope import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def rope(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    rotary_dim = table.shape[-1]
    cos, sin = (half[..., None, :].to(x.dtype) for half in table.chunk(2, dim=-1))
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    halves = (first * cos + -second * sin, second * cos + first * sin)
    turned = torch.stack(halves, dim=-1).flatten(-2) if interleaved else torch.cat(halves, dim=-1)
    return torch.cat([turned, passed], dim=-1)


def _fake(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return x.new_empty(x.shape)


register_torch_op(SCHEMA, rope, _fake)
reference = rope
