"""Torch reference of paged_latent_attention and its registration as `tapeout::paged_latent_attention`."""

from __future__ import annotations

import torch

from tapeout.plugins.attention.math import visible_keys
from tapeout.plugins.latent_attention.math import attend_latents
from tapeout.plugins.paged_latent_attention import SCHEMA
from tapeout.plugins.torch_op import register_torch_op


def paged_latent_attention(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    latent: torch.Tensor,
    k_rot: torch.Tensor,
    up_key: torch.Tensor,
    up_value: torch.Tensor,
    kv_pool: torch.Tensor,
    page_table: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """One sequence after the other, as plainly as possible."""
    nope, rot = (t.reshape(-1, *t.shape[-2:]) for t in (q_nope, q_rot))
    rows = torch.cat([t.reshape(-1, t.shape[-1]) for t in (latent, k_rot)], dim=-1)
    tokens_per_page, rank = kv_pool.shape[-2], latent.shape[-1]
    out = torch.empty((*nope.shape[:-1], up_value.shape[1]), dtype=nope.dtype, device=nope.device)
    bounds = cu_q.tolist()
    for b, kv_len in enumerate(kv_lens.tolist()):
        span = slice(bounds[b], bounds[b + 1])
        tokens = torch.arange(kv_len, device=nope.device)
        pages, slots = page_table[b].long()[tokens // tokens_per_page], tokens % tokens_per_page
        positions = tokens[kv_len - (span.stop - span.start) :]
        halves = rows[span].to(kv_pool.dtype).chunk(2, dim=-1)
        for half, values in enumerate(halves):
            kv_pool[pages[positions], layer, half, 0, slots[positions]] = values
        cached = torch.cat([kv_pool[pages, layer, half, 0, slots] for half in range(2)], dim=-1)
        visible = visible_keys(positions, tokens, window)
        keys = cached[:, :rank], cached[:, rank:]
        out[span] = attend_latents(nope[span], rot[span], *keys, up_key, up_value, visible, scale)
    return out.reshape(*q_nope.shape[:-1], up_value.shape[1])


def _fake(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    latent: torch.Tensor,
    k_rot: torch.Tensor,
    up_key: torch.Tensor,
    up_value: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    return q_nope.new_empty((*q_nope.shape[:-1], up_value.shape[1]))


register_torch_op(SCHEMA, paged_latent_attention, _fake, mutates=("kv_pool",))
reference = paged_latent_attention
