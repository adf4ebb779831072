"""Capacity and micro-batch scheduler on their own, the pool's budget, and packing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.plugins.errors import CapacityError, UsageError
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.kv_budget import plan_kv_pool
from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.scheduler.capacity import CapacityScheduler, HoldCause
from tapeout.runtime.scheduler.microbatch import MicroBatchScheduler
from tapeout.runtime.scheduler.plan import Reason
from tapeout.runtime.scheduler.policies import CapacityPolicy
from tapeout.runtime.scheduler.queue import WaitingQueue
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


Member = tuple[Request, dict[str, int]]  # a request and its numbers in `Running`


def prefilling(name: str, prompt: int, **state: int) -> Member:
    return request(name, prompt), state


def decoding(name: str, **state: int) -> Member:
    return request(name, 2, max_tokens=99), {"cached_tokens": 2} | state


def running_of(*members: Member) -> Running:
    """Slots are given from the last one down, so that an order by slot is not the order of admission."""
    running = Running(num_slots=max(len(members), 1), max_output_tokens=99)
    for slot, (made, state) in zip(reversed(range(len(members))), members, strict=True):
        made.slot = slot
        running.add(made)
        for key, value in state.items():
            getattr(running, key)[slot] = value
        if running.cached_tokens[slot] >= made.context_tokens:
            running.turn_tokens[slot] = made.worst_case_tokens - 1
    return running


# ---- capacity -----------------------------------------------------------------------------


def queue_of(requests: Iterable[Request]) -> WaitingQueue:
    queue = WaitingQueue()
    for number, made in enumerate(requests):
        made.rank = (0, number)
        queue.add(made)
    return queue


def cache(num_pages: int, tokens_per_page: int = 4) -> KvCache:
    return KvCache(num_pages=num_pages, tokens_per_page=tokens_per_page, num_slots=8, max_seq_len=100)


def test_admits_while_the_worst_case_fits() -> None:
    scheduler = CapacityScheduler(num_pages=10, tokens_per_page=4, max_batch_size=8)
    queue = queue_of([request("a", 10, 6), request("b", 10, 7), request("c", 1, 1), request("d", 1, 1)])
    running, kv_cache = running_of(), cache(10)
    admitted, held = scheduler.admit(queue, running, kv_cache)
    # a: 16 tokens = 4 pages, b: 17 = 5, c: 2 = 1; d finds none left
    assert [(r.request_id, a.pages) for r, a in admitted] == [("a", 4), ("b", 5), ("c", 1)]
    assert held is not None
    assert held.reason() == "waiting: worst case 1 pages, 0 uncommitted"
    scheduler.release(admitted[0][0])
    assert scheduler.committed_pages == 6
    assert [r.request_id for r, _ in scheduler.admit(queue, running, kv_cache)[0]] == ["d"]


@pytest.mark.parametrize("policy", CapacityPolicy)
def test_the_head_is_not_overtaken(policy: CapacityPolicy) -> None:
    scheduler = CapacityScheduler(num_pages=6, tokens_per_page=4, max_batch_size=8, policy=policy)
    queue = queue_of([request("first", 8, 8), request("big", 13, 8), request("small", 1, 1)])
    kv_cache = cache(6)
    admitted, held = scheduler.admit(queue, running_of(), kv_cache)
    assert [r.request_id for r, _ in admitted] == ["first"]
    assert held is not None
    assert held.request_id == "big"


def test_max_utilization_admits_on_present_need() -> None:
    """Context and a page more, beside the same for those that run; never more than the worst case."""
    scheduler = CapacityScheduler(
        num_pages=10, tokens_per_page=4, max_batch_size=8, policy=CapacityPolicy.MAX_UTILIZATION
    )
    kv_cache = cache(10)
    queue = queue_of([request("a", 8, 30), request("b", 8, 30), request("c", 8, 2), request("d", 1, 1)])
    admitted, held = scheduler.admit(queue, running_of(), kv_cache)
    # a and b: 8 + 4 tokens = 3 pages each; c: never more than 10 tokens = 3; d: 2 tokens = 1
    assert [(r.request_id, a.pages, a.available_pages) for r, a in admitted] == [
        ("a", 3, 10),
        ("b", 3, 7),
        ("c", 3, 4),
        ("d", 1, 1),
    ]
    assert held is None
    running = Running(num_slots=8, max_output_tokens=99)
    for made, _ in admitted:
        running.add(made)
    kv_cache.grow(np.array([admitted[0][0].slot]), np.array([8], np.int32))
    running.cached_tokens[admitted[0][0].slot] = 12  # a page's worth beyond the context by now
    _, held = scheduler.admit(queue_of([request("e", 1, 1)]), running, kv_cache)
    assert held is not None
    # 8 free; a needs 4 pages and holds 2, b and c 3 each, d 1
    assert held.reason() == (
        "waiting: present need 1 pages, 0 free beyond the present need of those that run"
    )


def test_no_reason_is_looked_for_where_nobody_hears_it() -> None:
    """Without a free page nobody is admitted; what the request would need takes a search."""
    scheduler = CapacityScheduler(
        num_pages=4, tokens_per_page=4, max_batch_size=8, policy=CapacityPolicy.MAX_UTILIZATION
    )
    kv_cache = cache(4)
    kv_cache.grow(np.array([7]), np.array([16], np.int32))
    queue = queue_of([request("a", 6, 9)])
    admitted, held = scheduler.admit(queue, running_of(), kv_cache, is_heard=True)
    assert held is not None
    assert (admitted, held.cause, held.needed, held.available) == ([], HoldCause.PAGES, 3, 0)
    assert scheduler.admit(queue, running_of(), kv_cache, is_heard=False) == ([], None)
    kv_cache.free(7)
    admitted, held = scheduler.admit(queue, running_of(), kv_cache, is_heard=False)
    assert ([r.request_id for r, _ in admitted], held) == (["a"], None)


def test_a_static_batch_admits_nobody_while_a_slot_is_taken() -> None:
    scheduler = CapacityScheduler(
        num_pages=10, tokens_per_page=4, max_batch_size=2, policy=CapacityPolicy.STATIC_BATCH
    )
    queue, kv_cache = queue_of([request(name, 4, 4) for name in "abcd"]), cache(10)
    (first, _), (second, _) = scheduler.admit(queue, running_of(), kv_cache)[0]
    scheduler.release(first)
    admitted, held = scheduler.admit(queue, running_of(), kv_cache)
    assert admitted == []
    assert held is not None
    assert held.reason() == "waiting: static batch, 1 requests of the batch before still run"
    scheduler.release(second)
    assert [r.request_id for r, _ in scheduler.admit(queue, running_of(), kv_cache)[0]] == ["c", "d"]


def test_what_never_fits_is_told_with_its_numbers() -> None:
    scheduler = CapacityScheduler(num_pages=4, tokens_per_page=4, max_batch_size=2)
    assert scheduler.refusal(request("a", 10, 6)) is None
    assert scheduler.refusal(request("b", 10, 7)) == (
        "10 prompt tokens and 7 to generate need 5 KV pages of 4 tokens; the pool has 4"
    )


@pytest.mark.parametrize("policy", CapacityPolicy)
def test_admission_does_not_look_beyond_what_it_admits(policy: CapacityPolicy) -> None:
    """The same operations on the queue whether 10 or 5,000 wait."""

    class CountingQueue(WaitingQueue):
        calls = 0

        def first(self) -> Request | None:
            self.calls += 1
            return super().first()

        def remove(self, request_id: str) -> Request | None:
            self.calls += 1
            return super().remove(request_id)

        def __iter__(self) -> Iterator[Request]:
            raise AssertionError("admission must not walk the queue")

    counts = []
    for waiting in (10, 5_000):
        scheduler = CapacityScheduler(num_pages=99, tokens_per_page=4, max_batch_size=3, policy=policy)
        queue = CountingQueue()
        for number in range(waiting):
            made = request(str(number), 4)
            made.rank = (0, number)
            queue.add(made)
        scheduler.admit(queue, running_of(), cache(99))
        counts.append(queue.calls)
        assert len(queue) == waiting - 3
    assert counts == [7, 7]  # three looked at and taken, the fourth looked at


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(-3, 3)),
            st.tuples(st.sampled_from(["take", "abort"]), st.integers(0, 30)),
        ),
        max_size=200,
    )
)
def test_the_queue_gives_the_lowest_rank_whatever_was_taken_out(steps: list[tuple[str, int]]) -> None:
    queue, model, number = WaitingQueue(), {}, 0
    for what, value in steps:
        if what == "add":
            made = request(str(number), 1)
            made.rank = (value, number)
            number += 1
            queue.add(made)
            model[made.request_id] = made
        elif what == "take" and model:
            first = queue.first()
            assert first is min(model.values(), key=lambda r: r.rank)
            assert queue.remove(first.request_id) is first
            if value % 3:
                del model[first.request_id]
            else:
                queue.add(first)  # as a paused request comes back
        elif what == "abort":
            assert queue.remove(str(value)) is model.pop(str(value), None)
        assert len(queue) == len(model)
        assert queue.first() is min(model.values(), key=lambda r: r.rank, default=None)


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
    plan = MicroBatchScheduler(max_num_tokens=10).plan(0, running_of(decoding("a", cached_tokens=100)))
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
