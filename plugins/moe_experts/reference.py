"""Torch reference of moe_experts and its registration as `tapeout::moe_experts`."""

from __future__ import annotations

import torch
from torch.nn import functional

from tapeout.plugins.activation.functions import function
from tapeout.plugins.moe_experts import SCHEMA
from tapeout.plugins.torch_op import register_torch_op

CLAMPED = "swiglu_clamped"


def gate_activation(
    projected: torch.Tensor, activation: str, gated: bool, alpha: float, limit: float
) -> torch.Tensor:
    """[..., U] -> [..., I]."""
    if not gated:
        return function(activation)(projected)
    gate, up = projected.chunk(2, dim=-1)
    if activation == CLAMPED:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(alpha * gate))
    return function(activation)(gate) * up


def moe_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    gated: bool,
    has_bias: bool,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """One expert after the other, as plainly as possible."""
    rows = x.reshape(-1, x.shape[-1])
    ids, weights = expert_ids.reshape(rows.shape[0], -1), expert_weights.reshape(rows.shape[0], -1).float()
    parts = torch.zeros((*ids.shape, x.shape[-1]), dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        row, column = torch.where(ids == expert)
        bias = (None, None) if up_bias is None or down_bias is None else (up_bias[expert], down_bias[expert])
        projected = functional.linear(rows[row], up[expert], bias[0])
        inner = gate_activation(projected, activation, gated, alpha, limit)
        parts[row, column] = functional.linear(inner, down[expert], bias[1]).float()
    return (parts * weights[..., None]).sum(1).to(x.dtype).reshape(x.shape)


def _fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


register_torch_op(SCHEMA, moe_experts, _fake)
reference = moe_experts
