"""From a step plan to the packed arrays an executor takes."""

from __future__ import annotations

import numpy as np

from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.scheduler.plan import StepPlan
from tapeout.runtime.scheduler.running import Running
from tapeout.runtime.step import FROM_SLOT, StepInputs


def pack_step(plan: StepPlan, running: Running, kv_cache: KvCache) -> StepInputs:
    """The inputs of a planned step; the page tables must already cover its tokens."""
    slots, kv_lens = plan.slots.astype(np.int32), plan.ends
    page_table = kv_cache.tables[:, : kv_cache.pages_for(int(kv_lens.max()))][plan.slots]
    if plan.num_context == 0:  # one row a sequence
        count = np.arange(len(slots) + 1, dtype=np.int32)
        return StepInputs(
            token_ids=np.full(len(slots), FROM_SLOT, np.int32),
            positions=plan.starts,
            cu_q=count,
            kv_lens=kv_lens,
            page_table=page_table,
            slots=slots,
            row_ids=count[:-1],
            row_slots=slots,
        )
    cu_q, sizes = np.zeros(len(slots) + 1, np.int32), plan.sizes
    sizes.cumsum(out=cu_q[1:])
    total = int(cu_q[-1])
    return StepInputs(
        token_ids=_token_ids(plan, running, total),
        positions=np.arange(total, dtype=np.int32) + (plan.starts - cu_q[:-1]).repeat(sizes),
        cu_q=cu_q,
        kv_lens=kv_lens,
        page_table=page_table,
        slots=slots,
        row_ids=(cu_q[1:] - 1)[plan.samples],
        row_slots=slots[plan.samples],
    )


def _token_ids(plan: StepPlan, running: Running, total: int) -> np.ndarray:
    """[total]: pieces of contexts, then FROM_SLOT."""
    token_ids = np.full(total, FROM_SLOT, np.int32)
    columns = (plan.slots, plan.starts, plan.sizes)
    first = 0
    for slot, start, size in zip(*(c[: plan.num_context].tolist() for c in columns), strict=True):
        token_ids[first : first + size] = running.request(slot).context_token_ids[start : start + size]
        first += size
    return token_ids
