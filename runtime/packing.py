"""From a step plan to the packed arrays an executor takes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.scheduler.microbatch import StepPlan
from tapeout.runtime.scheduler.request import Request
from tapeout.runtime.step import FROM_SLOT, StepInputs


def pack_step(plan: StepPlan, requests: Mapping[str, Request], kv_cache: KvCache) -> StepInputs:
    """The inputs of a planned step; the page tables must already cover its tokens."""
    rows = plan.scheduled
    sizes = np.array([s.num_tokens for s in rows], dtype=np.int32)
    starts = np.array([s.start for s in rows], dtype=np.int32)
    slots = np.array([s.slot for s in rows], dtype=np.int32)
    samples = np.array([s.samples for s in rows], dtype=bool)

    cu_q = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(sizes, out=cu_q[1:])
    total = int(cu_q[-1])
    positions = np.arange(total, dtype=np.int32) + np.repeat(starts - cu_q[:-1], sizes)

    token_ids = np.full(total, FROM_SLOT, dtype=np.int32)
    first = 0
    for chunk in plan.context:
        prompt = requests[chunk.request_id].prompt_token_ids
        token_ids[first : first + chunk.num_tokens] = prompt[chunk.start : chunk.start + chunk.num_tokens]
        first += chunk.num_tokens

    kv_lens = starts + sizes
    width = kv_cache.pages_for(int(kv_lens.max()))
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        cu_q=cu_q,
        kv_lens=kv_lens,
        page_table=kv_cache.tables[slots, :width],
        slots=slots,
        row_ids=(cu_q[1:] - 1)[samples],
        row_slots=slots[samples],
    )
