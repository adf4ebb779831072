"""Torch reference of embedding and its registration as `tapeout::embedding`."""

from __future__ import annotations

import torch

from tapeout.plugins.embedding import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(token_ids, weight)


def _fake(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty((*token_ids.shape, weight.shape[1]))


register_torch_op(SCHEMA, embedding, _fake)
reference = embedding
