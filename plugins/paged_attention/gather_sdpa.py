"""paged_attention as one batched gather of pages and one scaled_dot_product_attention call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature, StepState
from tapeout.plugins.op import AttrValue


def _write_kv(step: StepState, layer: int, sequence: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put the step's keys and values [T, Hkv, D] into their pages; `sequence` [T] owns the rows."""
    positions = step.positions[: k.shape[0]].long()
    pages = step.page_table[sequence, positions // step.tokens_per_page].long()
    slots = positions % step.tokens_per_page
    step.kv_pool[pages, layer, 0, :, slots] = k.to(step.kv_pool.dtype)
    step.kv_pool[pages, layer, 1, :, slots] = v.to(step.kv_pool.dtype)


def _gather_kv(step: StepState, layer: int, num_seqs: int, max_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, Hkv, max_kv, D]; zero beyond a sequence's length.

    Stale cache bytes may be NaN, and a masked NaN still poisons a matrix product.
    """
    num_pages = -(-max_kv // step.tokens_per_page)
    pages = step.page_table[:num_seqs, :num_pages].long().clamp_min(0)
    gathered = step.kv_pool[:, layer][pages]  # [B, P, 2, Hkv, tokens_per_page, D]
    both = gathered.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :max_kv]
    absent = torch.arange(max_kv)[None] >= step.kv_lens[:num_seqs, None]
    both = both.masked_fill(absent[None, :, None, :, None], 0)
    return both[0], both[1]


class GatherSdpa(CpuTactic):
    """No loop over sequences; queries are padded to the longest run, keys to the longest cache."""

    op = "paged_attention"
    name = "gather_sdpa"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        if signature.attrs["alibi"]:
            return "scaled_dot_product_attention would need ALiBi as a mask of every step's size"
        if signature.weights:
            return "scaled_dot_product_attention has no attention sinks"
        if float(signature.attrs.get("softcap", 0.0)) > 0:
            return "scaled_dot_product_attention has no softcap"
        return None

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (q, k, v), (out,) = call.inputs, call.outputs
        step, attrs = call.step, call.attrs

        def run() -> None:
            self._run(q, k, v, out, step, attrs)

        return run

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        step: StepState,
        attrs: Mapping[str, AttrValue],
    ) -> None:
        _, num_seqs, max_q, max_kv = step.counts.tolist()
        layer, scale, window = int(attrs["layer"]), float(attrs["scale"]), int(attrs["window"])
        starts, kv_lens = step.cu_q[:num_seqs].long(), step.kv_lens[:num_seqs].long()
        q_lens = step.cu_q[1 : num_seqs + 1].long() - starts
        sequence = torch.repeat_interleave(torch.arange(num_seqs), q_lens, output_size=q.shape[0])
        _write_kv(step, layer, sequence, k, v)
        keys, values = (t.to(q.dtype) for t in _gather_kv(step, layer, num_seqs, max_kv))
        q_positions = (kv_lens - q_lens)[:, None] + torch.arange(max_q)
        distance = q_positions[:, :, None] - torch.arange(max_kv)
        visible = distance >= 0
        if window > 0:
            visible &= distance < window
        # Padding queries must see a key, or their NaN costs time; what they see does not matter.
        visible[:, :, 0] |= torch.arange(max_q) >= q_lens[:, None]
        if max_q == 1 and num_seqs == q.shape[0]:
            # Decode: the query heads of a group become query rows of their kv head.
            grouped = q.reshape(num_seqs, k.shape[1], -1, q.shape[2])
            result = torch.nn.functional.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=visible[:, None], scale=scale
            )
            out.copy_(result.reshape(out.shape))
            return
        column = torch.arange(q.shape[0]) - starts[sequence]
        padded = q.new_zeros((num_seqs, max_q, *q.shape[1:]))
        padded[sequence, column] = q
        result = torch.nn.functional.scaled_dot_product_attention(
            padded.transpose(1, 2), keys, values, attn_mask=visible[:, None], scale=scale, enable_gqa=True
        )
        out.copy_(result.transpose(1, 2)[sequence, column])
