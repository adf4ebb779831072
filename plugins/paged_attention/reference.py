"""Torch reference of paged_attention and its registration as `tapeout::paged_attention`."""

from __future__ import annotations

import torch

from tapeout.plugins.attention.math import alibi_bias, masked_attention, visible_keys
from tapeout.plugins.paged_attention import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    kv_pool: torch.Tensor,
    page_table: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    alibi: bool,
) -> torch.Tensor:
    """One sequence after the other, as plainly as possible."""
    rows, keys, values = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
    tokens_per_page = kv_pool.shape[-2]
    out = torch.empty(rows.shape, dtype=q.dtype, device=q.device)
    bounds = cu_q.tolist()
    for b, kv_len in enumerate(kv_lens.tolist()):
        span = slice(bounds[b], bounds[b + 1])
        tokens = torch.arange(kv_len, device=q.device)
        pages, slots = page_table[b].long()[tokens // tokens_per_page], tokens % tokens_per_page
        q_positions = tokens[kv_len - (span.stop - span.start) :]
        new_pages, new_slots = pages[q_positions], slots[q_positions]
        kv_pool[new_pages, layer, 0, :, new_slots] = keys[span].to(kv_pool.dtype)
        kv_pool[new_pages, layer, 1, :, new_slots] = values[span].to(kv_pool.dtype)
        cached_k, cached_v = kv_pool[pages, layer, 0, :, slots], kv_pool[pages, layer, 1, :, slots]
        visible = visible_keys(q_positions, tokens, window)
        bias = None if slopes is None else alibi_bias(slopes, q_positions, tokens)
        out[span] = masked_attention(rows[span], cached_k, cached_v, visible, sinks, scale, softcap, bias)
    return out.reshape(q.shape)


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    kv_pool: torch.Tensor,
    page_table: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    alibi: bool,
) -> torch.Tensor:
    return q.new_empty(q.shape)


register_torch_op(SCHEMA, paged_attention, _fake, mutates=("kv_pool",))
reference = paged_attention
