"""Torch reference of moe_router and its registration as `tapeout::moe_router`."""

from __future__ import annotations

import torch

from tapeout.plugins.moe_router import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def moe_router(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    chosen: int,
    scoring: str,
    groups: int,
    chosen_groups: int,
    group_by: str,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    if scoring == "softmax_of_chosen":
        scores = logits
    else:
        scores = torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)
    choice = scores if bias is None else scores + bias.float()
    if groups > 1:
        by_group = choice.unflatten(-1, (groups, -1))
        best = by_group.topk(2, -1).values.sum(-1) if group_by == "best_two" else by_group.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(
            -1, best.topk(chosen_groups, -1).indices, True
        )
        choice = by_group.masked_fill(~kept[..., None], 0.0).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :chosen]
    weights = scores.gather(-1, ids)
    if scoring == "softmax_of_chosen":
        weights = torch.softmax(weights, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.to(torch.int32), weights * scale


def _fake(
    logits: torch.Tensor, bias: torch.Tensor | None, chosen: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*logits.shape[:-1], chosen)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


register_torch_op(SCHEMA, moe_router, _fake)
reference = moe_router
