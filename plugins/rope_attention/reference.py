"""Torch reference of rope_attention and its registration as `tapeout::rope_attention`."""

from __future__ import annotations

import torch

from tapeout.plugins.paged_attention.reference import paged_attention
from tapeout.plugins.rms_norm.reference import rms_norm
from tapeout.plugins.rope.reference import rope
from tapeout.plugins.rope_attention import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def rope_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    sinks: torch.Tensor | None,
    kv_pool: torch.Tensor,
    page_table: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    interleaved: bool,
    qk_norm: bool,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
) -> torch.Tensor:
    if qk_norm:
        assert q_norm is not None
        assert k_norm is not None
        q = rms_norm(q, q_norm, eps, weight_offset, cast_before_weight)
        k = rms_norm(k, k_norm, eps, weight_offset, cast_before_weight)
    q, k = rope(q, table, interleaved), rope(k, table, interleaved)
    step = kv_pool, page_table, cu_q, kv_lens
    return paged_attention(q, k, v, None, sinks, *step, layer, scale, window, softcap, False)


def _fake(q: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape)


register_torch_op(SCHEMA, rope_attention, _fake, mutates=("kv_pool",))
reference = rope_attention
