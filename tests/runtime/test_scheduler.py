"""Capacity and micro-batch scheduler on their own, the pool's budget, and packing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.plugins.errors import CapacityError, UsageError
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.kv_budget import plan_kv_pool
from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.scheduler.capacity import CapacityScheduler
from tapeout.runtime.scheduler.microbatch import MicroBatchScheduler, Reason
from tapeout.runtime.scheduler.request import Request, RequestTimes
from tapeout.runtime.scheduler.running import Running

LIMITS = Limits(max_batch_size=4, max_num_tokens=64, max_seq_len=100, tokens_per_page=10)
PAGE_BYTES = 1000


def request(name: str, prompt: int, max_tokens: int = 5) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=np.zeros(prompt, dtype=np.int32),
        params=SamplingParams(),
        max_tokens=max_tokens,
        sink=None,  # type: ignore[arg-type]
        times=RequestTimes(0.0),
    )


def cache_of(num_pages: int) -> KvCache:
    return KvCache(num_pages=num_pages, tokens_per_page=4, num_slots=8, max_seq_len=100)


Member = tuple[Request, dict[str, int]]  # a request and its numbers in `Running`


def prefilling(name: str, prompt: int, **state: int) -> Member:
    return request(name, prompt), state


def decoding(name: str, **state: int) -> Member:
    return request(name, 2, max_tokens=99), {"cached_tokens": 2, "planned_tokens": 1} | state


def running_of(*members: Member) -> Running:
    """Slots are given from the last one down, so that an order by slot is not the order of admission."""
    running = Running(num_slots=max(len(members), 1), max_output_tokens=99)
    for slot, (made, state) in zip(reversed(range(len(members))), members, strict=True):
        made.slot = slot
        running.add(made)
        for key, value in state.items():
            getattr(running, key)[slot] = value
    return running


# ---- capacity -----------------------------------------------------------------------------


def test_admits_while_the_worst_case_fits() -> None:
    scheduler = CapacityScheduler(num_pages=10, tokens_per_page=4, max_batch_size=8)
    cache = cache_of(10)
    queue = [request("a", 10, 6), request("b", 10, 7), request("c", 1, 1), request("d", 1, 1)]
    admitted, waiting = scheduler.admit(queue, cache)
    # a: 16 tokens = 4 pages, b: 17 = 5, c: 2 = 1; d finds none left
    assert [(r.request_id, a.pages) for r, a in admitted] == [("a", 4), ("b", 5), ("c", 1)]
    assert waiting is not None
    assert waiting.reason() == "waiting: worst case 1 pages, 0 uncommitted"
    scheduler.release(admitted[0][0])
    assert scheduler.committed_pages == 6
    assert [r.request_id for r, _ in scheduler.admit(queue[3:], cache)[0]] == ["d"]


def test_the_head_is_not_overtaken() -> None:
    scheduler = CapacityScheduler(num_pages=4, tokens_per_page=4, max_batch_size=8)
    admitted, waiting = scheduler.admit([request("big", 13, 8), request("small", 1, 1)], cache_of(4))
    assert admitted == []
    assert waiting is not None
    assert waiting.request_id == "big"


def test_admission_does_not_look_beyond_what_it_admits() -> None:
    looked_at = 0

    def long_queue() -> Iterator[Request]:
        nonlocal looked_at
        for i in range(10_000):
            looked_at += 1
            yield request(str(i), 4)

    scheduler = CapacityScheduler(num_pages=100, tokens_per_page=4, max_batch_size=3)
    scheduler.admit(long_queue(), cache_of(100))
    assert looked_at == 4


# ---- micro-batch --------------------------------------------------------------------------


def test_generation_takes_the_budget_first_and_context_fills_the_rest() -> None:
    plan = MicroBatchScheduler(max_num_tokens=10).plan(
        0,
        running_of(
            prefilling("c1", 6), decoding("g1"), prefilling("c2", 6), decoding("g2"), prefilling("c3", 6)
        ),
    )
    assert [s.request_id for s in plan.scheduled] == ["c1", "c2", "g1", "g2"]
    assert [(s.num_tokens, s.samples, s.reason) for s in plan.context] == [
        (6, True, Reason.LAST_CHUNK),
        (2, False, Reason.CHUNK_BY_BUDGET),
    ]
    assert [(s.request_id, s.reason) for s in plan.skipped] == [("c3", Reason.NO_BUDGET)]


def test_chunk_tokens_caps_a_chunk() -> None:
    plan = MicroBatchScheduler(max_num_tokens=10, chunk_tokens=4).plan(
        0, running_of(prefilling("a", 9, cached_tokens=4), prefilling("b", 3))
    )
    assert [(s.start, s.num_tokens, s.samples, s.reason) for s in plan.context] == [
        (4, 4, False, Reason.CHUNK_BY_LIMIT),
        (0, 3, True, Reason.LAST_CHUNK),
    ]


def test_a_request_whose_last_token_is_planned_gets_no_row() -> None:
    plan = MicroBatchScheduler(max_num_tokens=10).plan(0, running_of(decoding("a", planned_tokens=99)))
    assert plan.scheduled == ()
    assert plan.skipped[0].reason is Reason.ALL_PLANNED


def test_generation_beyond_the_budget_takes_turns() -> None:
    scheduler, running = MicroBatchScheduler(max_num_tokens=2), running_of(*map(decoding, "abcde"))
    turns: list[set[str]] = []
    for step in range(12):
        plan = scheduler.plan(step, running)
        turns.append({s.request_id for s in plan.scheduled})
        running.last_step[plan.slots] = step
    assert all(len(turn) == 2 for turn in turns)
    for first in range(10):
        assert set().union(*turns[first : first + 3]) == set("abcde"), "one turn each in ceil(5/2) steps"


@given(
    kinds=st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=12),
    budget=st.integers(1, 20),
    chunk=st.none() | st.integers(1, 8),
)
def test_any_plan_keeps_its_promises(kinds: list[tuple[int, bool]], budget: int, chunk: int | None) -> None:
    members = [
        decoding(f"{i}") if generates else prefilling(f"{i}", size)
        for i, (size, generates) in enumerate(kinds)
    ]
    running = running_of(*members)
    scheduler = MicroBatchScheduler(max_num_tokens=budget, chunk_tokens=chunk)
    plan = scheduler.plan(0, running)
    again = scheduler.plan(0, running)
    same = (plan.scheduled, plan.skipped) == (again.scheduled, again.skipped)
    assert same, "planning must be a function of its input"
    assert plan.num_tokens <= budget
    assert bool(plan.scheduled) == bool(members)
    assert all(s.num_tokens <= (chunk or budget) for s in plan.context)
    named = [s.request_id for s in plan.scheduled] + [s.request_id for s in plan.skipped]
    assert sorted(named) == sorted(r.request_id for r, _ in members), "every decision has a reason"


# ---- the pool's size ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "pages", "winner"),
    [
        ({"free_bytes": 10**9}, 40, "engine limits"),
        ({"free_bytes": 20_000}, 18, "free_memory_fraction"),
        ({"free_bytes": 20_000, "free_memory_fraction": 0.5}, 10, "free_memory_fraction"),
        ({"free_bytes": 10**9, "max_tokens": 57}, 5, "max_tokens_in_kv_cache"),
        ({"free_bytes": 10**9, "kv_cache_bytes": 7_999}, 7, "kv_cache_bytes"),
        ({"free_bytes": 10**9, "kv_cache_bytes": 7_999, "max_tokens": 60}, 6, "max_tokens_in_kv_cache"),
    ],
)
def test_the_smallest_bound_wins_and_is_named(options: dict[str, int], pages: int, winner: str) -> None:
    budget = plan_kv_pool(limits=LIMITS, page_bytes=PAGE_BYTES, **options)  # type: ignore[arg-type]
    assert (budget.num_pages, budget.winner) == (pages, winner)
    assert f"{pages} pages = {pages * 10} tokens" in budget.describe()
    assert f"set by {winner}" in budget.describe()


def test_a_pool_that_cannot_hold_a_page_is_refused() -> None:
    with pytest.raises(CapacityError, match="less than one page"):
        plan_kv_pool(limits=LIMITS, page_bytes=PAGE_BYTES, free_bytes=900)
    with pytest.raises(UsageError) as error:
        plan_kv_pool(
            limits=LIMITS,
            page_bytes=PAGE_BYTES,
            free_bytes=10**9,
            free_memory_fraction=1.5,
            max_tokens=9,
            kv_cache_bytes=999,
        )
    for name in ("free_memory_fraction = 1.5", "max_tokens_in_kv_cache = 9", "kv_cache_bytes = 999"):
        assert name in error.value.message
