"""Torch reference of select_rows and its registration as `tapeout::select_rows`."""

from __future__ import annotations

import torch

from tapeout.plugins.select_rows import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def select_rows(x: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
    return x.index_select(-2, row_ids)


def _fake(x: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-2], row_ids.shape[0], x.shape[-1]))


register_torch_op(SCHEMA, select_rows, _fake)
reference = select_rows
