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


def pages_short(plan: StepPlan, kv_cache: KvCache) -> int:
    """Pages that the pool lacks for the step's rows; 0 or less when there are enough."""
    free = kv_cache.num_free
    # However the pages of those rows are cut, they are no more than these: mostly there is nothing to count.
    at_most = plan.num_tokens // kv_cache.tokens_per_page + plan.num_sequences
    if at_most <= free:
        return at_most - free
    return int(kv_cache.missing_pages(plan.slots, plan.ends).sum()) - free


def slots_to_pause(plan: StepPlan, running: Running, kv_cache: KvCache, draining: np.ndarray) -> np.ndarray:
    """int64: slots of the fewest requests whose pause gives the others their pages; newest first, by rank.

    Args:
        draining: slots of requests that have ended or were paused, and that only wait for a step.

    The first by rank is never among them: any request fits into the pool alone.
    """
    order = running.order
    need = np.zeros(len(running.planned), np.int64)
    need[plan.slots] = kv_cache.missing_pages(plan.slots, plan.ends)
    # Who is about to end brings its pages back without being paused.
    ending = running.planned_tokens(order) >= running.max_tokens[order]
    leaving = np.union1d(draining, order[ending])
    candidates = order[~ending]
    # In the order of leaving from behind: a page that is shared comes back with the last who holds it.
    returning = kv_cache.returning_pages(np.concatenate([candidates, leaving])).astype(np.int64)
    coming = kv_cache.num_free + kv_cache.retired_pages + returning[len(candidates) :].sum()
    held = returning[: len(candidates)]
    # If the first k go on, they need this much, and this much comes from those behind them.
    needed, given = np.cumsum(need[candidates]), held.sum() - np.cumsum(held)
    stay = int(np.count_nonzero(needed <= coming + given))
    return candidates[max(stay, 1) :][::-1]


def fit_to_pages(plan: StepPlan, running: Running, kv_cache: KvCache, paused: np.ndarray) -> StepPlan:
    """The plan with the rows for which there are pages now, and without those of `paused` slots."""
    gone = np.zeros(len(running.planned), bool)
    gone[paused] = True
    rows = gone[plan.slots]  # rows to take out
    missing = kv_cache.missing_pages(plan.slots, plan.ends)
    missing[rows] = 0
    # Older ones first; who needs no page keeps its row.
    position = np.zeros(len(gone), np.int64)
    position[running.order] = np.arange(len(running.order))
    turn = np.argsort(position[plan.slots], kind="stable")
    too_many = np.zeros(len(rows), bool)
    too_many[turn] = np.cumsum(missing[turn]) > kv_cache.num_free
    rest = too_many & (missing > 0)
    left_out = [(reason, left[~gone[left]]) for reason, left in plan.left_out]
    return plan.without(rows | rest, (*left_out, (Reason.NO_PAGES, plan.slots[rest])))
