"""Room for a planned step: who is paused when pages run out, and whose rows wait for the pages.

Only MAX_UTILIZATION comes to this. Pages of a request that is part of a step not read yet are back in the
pool one step later, so a pause may help the next step only; until then the rows that lack pages wait, the
newest first.
"""

from __future__ import annotations

import numpy as np

from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.scheduler.plan import Reason, StepPlan
from tapeout.runtime.scheduler.running import Running

_FEW = 16


def lacking_pages(plan: StepPlan, kv_cache: KvCache) -> np.ndarray | None:
    """int32 [B]: pages that each of the step's rows needs and has not got, where the pool has too few for all
    of them; None where it has enough."""
    free = kv_cache.num_free
    # However the pages of those rows are cut, they are no more than these: mostly there is nothing to count.
    if plan.num_tokens // kv_cache.tokens_per_page + plan.num_sequences <= free:
        return None
    lacking = kv_cache.missing_pages(plan.slots, plan.ends)
    return lacking if lacking.sum() > free else None


def slots_to_pause(
    plan: StepPlan, lacking: np.ndarray, running: Running, kv_cache: KvCache, draining: np.ndarray
) -> np.ndarray:
    """int64: slots of the fewest requests whose pause gives the others their pages; newest first, by rank.

    The first by rank is never among them: any request fits into the pool alone.

    Args:
        lacking: what `lacking_pages` said.
        draining: slots of requests that have ended or were paused, and that only wait for a step.
    """
    candidates = running.order
    # Who is about to end brings its pages back without being paused.
    ending = plan.slots_left_out(Reason.ALL_PLANNED)
    if len(ending):
        stays = running.planned.copy()
        stays[ending] = False
        candidates = candidates[stays[candidates]]
        draining = np.concatenate([draining, ending])
    need = np.zeros(len(running.planned), np.int64)
    need[plan.slots] = lacking
    needed = need[candidates].cumsum()  # by the first, by the first two, ...
    free = kv_cache.num_free + kv_cache.retired_pages
    # It is the last ones that go, about as many as pages are short: the others are looked at only if need be.
    count, tail = len(candidates), max(int(needed[-1]) - free, 0) + _FEW
    while True:
        first = max(count - tail, 0)
        # In the order of leaving from behind: a page that is shared comes back with the last who holds it.
        returning = kv_cache.returning_pages(np.concatenate([candidates[first:], draining]))
        held = returning[: count - first]
        coming = free + int(returning[count - first :].sum())
        # If the first k go on, they need this much, and this much comes from those behind them.
        given = coming + int(held.sum())
        if first == 0 or needed[first - 1] <= given:
            stay = first + int(np.count_nonzero(needed[first:] <= given - held.cumsum()))
            return candidates[max(stay, 1) :][::-1]
        tail *= 4


def fit_to_pages(plan: StepPlan, lacking: np.ndarray, running: Running, kv_cache: KvCache) -> StepPlan:
    """The plan with the rows for which there are pages now, and without those of requests that were paused
    or have ended since it was made."""
    gone = ~running.planned[plan.slots]  # rows to take out
    missing = np.where(gone, 0, lacking)
    # Older ones first; who needs no page keeps its row.
    if plan.num_context:  # it stands before generation, whoever is older
        position = np.zeros(len(running.planned), np.int64)
        position[running.order] = np.arange(len(running.order))
        turn = np.argsort(position[plan.slots], kind="stable")
        total = np.zeros(len(missing), np.int64)
        total[turn] = missing[turn].cumsum()
    else:
        total = missing.cumsum()
    rest = (total > kv_cache.num_free) & (missing > 0)
    left_out = [(reason, left[running.planned[left]]) for reason, left in plan.left_out]
    return plan.without(gone | rest, (*left_out, (Reason.NO_PAGES, plan.slots[rest])))
