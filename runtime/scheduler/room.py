"""Room for a planned step: who is paused when pages run out, and whose rows wait for the pages.

Only MAX_UTILIZATION comes to this. Pages of a request that is part of a step not read yet are back in the
pool one step later, so a pause may help the next step only; until then the rows that lack pages wait, the
newest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.scheduler.plan import Reason, StepPlan
from tapeout.runtime.scheduler.running import Running


class LackingRows(NamedTuple):
    """Rows of a plan whose requests have not got all the pages they need; in a step that decodes a few.

    rows: int64 [L] their places in the plan, ascending. pages: int32 [L] how many each lacks, at least one.
    total: of those pages.
    """

    rows: np.ndarray
    pages: np.ndarray
    total: int


def lacking_pages(plan: StepPlan, kv_cache: KvCache) -> LackingRows | None:
    """What the step's rows lack, where the pool has too few pages for all; None where it has enough."""
    free = kv_cache.num_free
    # However the pages of those rows are cut, they are no more than these: mostly there is nothing to count.
    if plan.num_tokens // kv_cache.tokens_per_page + plan.num_sequences <= free:
        return None
    rows, pages = kv_cache.lacking_pages(plan.slots, plan.ends)
    total = sum(pages.tolist())
    return LackingRows(rows, pages, total) if total > free else None


def slots_to_pause(
    plan: StepPlan, lacking: LackingRows, running: Running, kv_cache: KvCache, draining: Sequence[int]
) -> np.ndarray:
    """int64: slots of the fewest requests whose pause gives the others their pages; newest first, by rank.

    The first by rank is never among them: any request fits into the pool alone. Cost: pages of those that
    are paused or drain, all of which are about to be freed, and of one more.

    Args:
        draining: slots of requests that have ended or were paused, and that only wait for a step.
    """
    # Who is about to end brings its pages back without being paused.
    ending = plan.slots_left_out(Reason.ALL_PLANNED)
    order = running.order
    departures = kv_cache.departures(len(draining) + len(order) - 1)  # the first by rank stays
    given = kv_cache.num_free + kv_cache.retired_pages
    for leaving in (draining, ending):
        if len(leaving):
            given += sum(departures.leave(np.asarray(leaving, np.int64)))
    need = dict(zip(plan.slots[lacking.rows].tolist(), lacking.pages.tolist(), strict=True))
    needed, newest_first = lacking.total, order[::-1]
    if len(ending):
        stays = np.ones(len(running.planned), bool)
        stays[ending] = False
        newest_first = newest_first[stays[newest_first]]
    paused, most = 0, len(newest_first) - 1
    back = departures.leave(newest_first)
    while needed > given and paused < most:
        given += next(back)
        needed -= need.get(newest_first.item(paused), 0)
        paused += 1
    return newest_first[:paused].copy()


def fit_to_pages(plan: StepPlan, lacking: LackingRows, running: Running, kv_cache: KvCache) -> StepPlan:
    """The plan with the rows for which there are pages now, and without those of requests that were paused
    or have ended since it was made."""
    kept = running.planned[plan.slots]
    stay = kept[lacking.rows]
    rows, pages = lacking.rows[stay], lacking.pages[stay]
    # Older ones first; who needs no page keeps its row.
    if plan.num_context:  # it stands before generation, whoever is older
        turn = running.turns(plan.slots[rows])
        rows, pages = rows[turn], pages[turn]
    free = kv_cache.num_free
    sums = accumulate(pages.tolist())
    waiting = np.array(
        sorted(row for row, sum_ in zip(rows.tolist(), sums, strict=True) if sum_ > free), np.int64
    )
    kept[waiting] = False
    left_out = [(reason, left[running.planned[left]]) for reason, left in plan.left_out]
    return plan.only(kept.nonzero()[0], (*left_out, (Reason.NO_PAGES, plan.slots[waiting])))
