"""The loop as a state machine: whatever comes, in whatever order, under every policy.

Arrivals, shared prompts, cancellations, failing steps and page copies, logits that are not finite, too few
pages, pins and clears of the prefix cache, and other weights are mixed by hypothesis. The fake executor
keeps real pages of token ids, so a page that is shared wrongly, freed too early, computed by other weights
or filled with the wrong tokens changes what a request gets.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tapeout.plugins.errors import UsageError
from tapeout.runtime import loop as loop_module
from tapeout.runtime.kv_cache import CacheUser, KvCache, PinnedPrefix, PrefixCacheOptions
from tapeout.runtime.scheduler import room
from tapeout.runtime.scheduler.plan import Reason, StepPlan
from tapeout.runtime.scheduler.policies import CapacityPolicy, ChunkingPolicy
from tapeout.runtime.scheduler.record import PauseCause, StepRecord
from tapeout.runtime.scheduler.request import FinishReason
from tapeout.runtime.scheduler.room import LackingRows
from tapeout.runtime.scheduler.running import Running

MAX_SEQ_LEN = 24
#: A prompt that begins so gets logits that are not finite once it has grown by some tokens.
CURSED = 21
STEM = [3, 1, 2, 1, 3, 2]
PROMPTS = st.lists(st.integers(1, CURSED), min_size=1, max_size=8) | st.builds(
    lambda count, tail: STEM[:count] + tail,
    st.integers(1, len(STEM)),
    st.lists(st.integers(1, 3), max_size=2),
)


class Scheduling(RuleBasedStateMachine):
    """Set by the fixture below: what makes a loop over a fake executor."""

    fakes: SimpleNamespace

    @initialize(
        tokens_per_page=st.integers(1, 5),
        spare_pages=st.integers(0, 5),
        max_batch_size=st.integers(1, 6),
        max_num_tokens=st.integers(1, 14),
        chunk_tokens=st.none() | st.integers(1, 9),
        # The one that pauses is the one with most to go wrong.
        capacity_policy=st.sampled_from([CapacityPolicy.MAX_UTILIZATION] * 4 + list(CapacityPolicy)),
        chunking_policy=st.sampled_from(ChunkingPolicy),
        overlap=st.booleans(),
        reuse=st.sampled_from([True, True, True, False]),
        host_pages=st.integers(0, 6),
    )
    def start(
        self, *, spare_pages: int, tokens_per_page: int, reuse: bool, host_pages: int, **options: Any
    ) -> None:
        self.options = options
        # From a pool that holds one request at its longest up.
        num_pages = -(-MAX_SEQ_LEN // tokens_per_page) + spare_pages
        self.rig = self.fakes.make_rig(
            num_pages=num_pages,
            tokens_per_page=tokens_per_page,
            max_seq_len=MAX_SEQ_LEN,
            nan_when=lambda tokens: tokens[0] == CURSED and len(tokens) >= 6,
            script=self.fakes.rarely_ending_id,
            host_pages=host_pages if reuse else 0,
            cache_options=PrefixCacheOptions(enable_prefix_reuse=reuse),
            **options,
        )
        self.tokens_per_page = tokens_per_page
        self.wanted: dict[str, tuple[list[int], int]] = {}
        self.may_fail: set[str] = set()
        self.aborted: set[str] = set()
        self.pins: list[PinnedPrefix] = []
        self.waited: dict[str, int] = {}
        self.records: list[StepRecord] = []
        self.admit = self.rig.loop._admit
        self.rig.loop._admit = self.admit_and_check
        self.rig.loop.observer = SimpleNamespace(  # while the step is planned, so that state is its own
            on_arrival=lambda *_: None, on_step=self.check_record, on_finish=lambda *_: None
        )
        self.rig.loop.on_step = self.cancel_when_told
        self.cancel_next: str | None = None
        self.context_was_left_out = False

    @rule(
        requests=st.lists(
            st.tuples(
                PROMPTS,
                st.integers(1, 16),  # max_tokens
                st.sampled_from([0, 0, 0, 1, -1]),  # priority
                st.booleans(),  # watched
            ),
            min_size=1,
            max_size=4,
        )
    )
    def arrive(self, requests: list[tuple[list[int], int, int, bool]]) -> None:
        for prompt, max_tokens, priority, watched in requests:
            self.rig.add(prompt, max_tokens, priority=priority, watched=watched)
            self.wanted[f"r{len(self.wanted)}"] = (prompt, max_tokens)

    @rule(turns=st.integers(1, 8))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.one_turn()

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.wanted)))
        if self.rig.loop.abort(request_id):
            self.aborted.add(request_id)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def cancel_from_on_step(self, data: st.DataObject) -> None:
        self.cancel_next = data.draw(st.sampled_from(sorted(self.wanted)))
        self.one_turn()

    def cancel_when_told(self, _: StepRecord) -> None:
        request_id, self.cancel_next = self.cancel_next, None
        if request_id is not None and self.rig.loop.abort(request_id):
            self.aborted.add(request_id)

    @precondition(lambda self: len(self.wanted) % 4 == 3)  # not so often that little else happens
    @rule(refuse=st.booleans())
    def let_the_next_step_fail(self, refuse: bool) -> None:
        executor = self.rig.executor
        name = "refuse_steps" if refuse else "fail_steps"
        setattr(executor, name, getattr(executor, name) | {len(executor.steps)})

    @rule()
    def turn_in_which_copies_fail(self) -> None:
        self.rig.executor.fail_copies = True
        self.one_turn()
        self.rig.executor.fail_copies = False

    @precondition(lambda self: len(self.wanted) % 3 == 2)
    @rule()
    def clear_the_prefix_cache(self) -> None:
        self.rig.loop.kv_cache.clear()
        self.pins.clear()

    @precondition(lambda self: len(self.wanted) % 3 == 1)
    @rule(how=st.sampled_from(["finish", "recompute", "abort"]))
    def change_weights(self, how: str) -> None:
        loop = self.rig.loop
        loop.hold_admissions(True)
        if how == "recompute":
            loop.pause_all()
        elif how == "abort":
            self.aborted |= set(loop.running.names())
            loop.abort_running()
        while not loop.is_vacant:
            self.one_turn()
        loop.load_weights(SimpleNamespace(weights_digest=f"weights {self.rig.executor.weights + 1}"))
        loop.hold_admissions(False)
        self.pins.clear()
        assert loop.kv_cache.num_free == loop.kv_cache.num_pages
        assert loop.kv_cache.stats().device_pages == loop.kv_cache.stats().host_pages == 0

    @rule(tokens=st.integers(1, len(STEM)))
    def pin(self, tokens: int) -> None:
        loop = self.rig.loop
        available = loop.capacity.available_pages(loop.running, loop.kv_cache)
        try:
            ids = np.array(STEM[:tokens], np.int32)
            self.pins.append(loop.kv_cache.pin(ids, CacheUser(), available))
        except UsageError:
            return

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.rig.loop.kv_cache.unpin(self.pins.pop())

    @invariant()
    def pages_are_whole(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check_pages()

    def one_turn(self) -> bool:
        busy: bool = self.rig.loop.step()
        self.rig.check_pages()
        return busy

    def admit_and_check(self) -> Any:
        """What is available after an admission is what there was, less what it said it needs."""
        held = self.admit()
        loop = self.rig.loop
        admitted = loop._decisions.admitted
        for one, following in itertools.pairwise(admitted):
            assert following.available_pages == one.available_pages - one.pages
        if admitted:
            left = admitted[-1].available_pages - admitted[-1].pages
            assert loop.capacity.available_pages(loop.running, loop.kv_cache) == left >= 0
        return held

    def check_record(self, record: StepRecord) -> None:
        self.records.append(record)
        plan, requests, most = record.plan, self.rig.requests, self.options
        executor = self.rig.executor
        if len(executor.steps) in executor.fail_steps | executor.refuse_steps:
            self.may_fail |= {s.request_id for s in plan.scheduled}
        if executor.fail_copies:
            self.may_fail |= set(self.rig.loop.running.names())
        assert plan.num_tokens <= most["max_num_tokens"]
        assert plan.num_sequences <= most["max_batch_size"]
        named = [s.request_id for s in plan.scheduled] + [s.request_id for s in plan.skipped]
        assert len(named) == len(set(named))
        for row in plan.context:
            assert row.num_tokens <= (most["chunk_tokens"] or most["max_num_tokens"])
            end = row.start + row.num_tokens
            if not row.samples and end % self.tokens_per_page:
                assert end // self.tokens_per_page <= row.start // self.tokens_per_page, "a page was split"
        paused = [p for p in record.paused if p.cause is PauseCause.PAGES]
        if paused:
            assert most["capacity_policy"] is CapacityPolicy.MAX_UTILIZATION
            newest = min(requests[p.request_id].rank for p in paused)
            # Who only waits for its last token gives its pages back without being paused.
            ending = {s.request_id for s in plan.skipped if s.reason is Reason.ALL_PLANNED}
            others = [requests[name].rank for name in named if name not in ending]
            assert all(rank < newest for rank in others), "the oldest are kept"
        self.check_waits(record)

    def check_waits(self, record: StepRecord) -> None:
        """Whoever runs gets tokens within a number of steps that has nothing to do with what arrives."""
        plan, requests = record.plan, self.rig.requests
        left = {s.request_id: s.reason for s in plan.skipped if s.reason is not Reason.ALL_PLANNED}
        self.waited = {name: self.waited.get(name, 0) + 1 for name in left}
        served = {s.request_id for s in plan.context}
        batch, budget = self.options["max_batch_size"], self.options["max_num_tokens"]
        in_context = {name for name in left if self.reads_context(name)}
        for name, waited in self.waited.items():
            if name not in in_context:
                assert waited <= 2 * -(-batch // max(budget - 1, 1)) + 3
            elif self.options["chunking_policy"] is ChunkingPolicy.EQUAL_PROGRESS:
                assert waited <= 2 * batch + 2
            elif left[name] is Reason.NO_BUDGET:
                # Only the context of those before it keeps it, which ends; or it is generation's turn.
                before = any(requests[other].rank < requests[name].rank for other in served)
                assert before or (budget == 1 and not self.context_was_left_out)
        self.context_was_left_out = bool(in_context) and not served

    def reads_context(self, name: str) -> bool:
        running, request = self.rig.loop.running, self.rig.requests[name]
        if request.slot < 0:
            return False
        return bool(running.cached_tokens[request.slot] < running.context_tokens[request.slot])

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(3_000):
            if not self.one_turn():
                break
        assert not self.rig.loop.has_work, "some request never ends"
        kv_cache = self.rig.loop.kv_cache
        told = sum(e.pages for record in self.records for e in record.evicted)
        untold = sum(len(evicted.pages) for evicted in kv_cache.take_evictions())
        assert told + untold == kv_cache.stats().evicted_pages
        for pin in self.pins:
            self.rig.loop.kv_cache.unpin(pin)
        self.rig.check_idle()
        for name, (prompt, max_tokens) in self.wanted.items():
            sink = self.rig.sinks[name]
            expected = self.fakes.expected_ids(prompt, max_tokens, self.fakes.rarely_ending_id)
            if sink.finish.reason is FinishReason.ABORT:
                assert name in self.aborted
            elif sink.finish.reason is FinishReason.ERROR:
                cursed = prompt[0] == CURSED and "not finite" in sink.finish.stop_reason
                assert cursed or (name in self.may_fail and "scripted" in sink.finish.stop_reason)
            else:
                ended = FinishReason.STOP if expected[-1] == self.fakes.EOS else FinishReason.LENGTH
                assert (sink.token_ids, sink.finish.reason) == (expected, ended)
            assert sink.token_ids == expected[: len(sink.token_ids)]


def fewest_to_pause(
    plan: StepPlan, lacking: LackingRows, running: Running, kv_cache: KvCache, draining: list[int]
) -> list[int]:
    """What `slots_to_pause` is to find, by trying: one more from behind until the others have enough."""
    need = dict(zip(plan.slots[lacking.rows].tolist(), lacking.pages.tolist(), strict=True))
    ending = [s for reason, slots in plan.left_out if reason is Reason.ALL_PLANNED for s in slots.tolist()]
    going = [*draining, *ending]
    staying = [slot for slot in running.order.tolist() if slot not in ending]
    paused: list[int] = []
    while len(staying) > 1:
        tables = Counter(page for slot in [*going, *paused] for page in kv_cache.pages_of(slot))
        come_back = sum(kv_cache.pool.references(page) == count for page, count in tables.items())
        there_is = kv_cache.num_free + kv_cache.retired_pages + come_back
        if sum(need.get(slot, 0) for slot in staying) <= there_is:
            break
        paused.append(staying.pop())
    return paused


@pytest.fixture
def state_machine(fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> type[Scheduling]:
    def checked(*args: Any) -> np.ndarray:
        found = room.slots_to_pause(*args)
        assert found.tolist() == fewest_to_pause(*args)
        return found

    monkeypatch.setattr(loop_module, "slots_to_pause", checked)
    return type("BoundScheduling", (Scheduling,), {"fakes": fakes})


def test_any_course_of_events(state_machine: type[Scheduling], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="tapeout")  # steps fail all the time
    run_state_machine_as_test(
        state_machine, settings=settings(max_examples=80, stateful_step_count=25, deadline=None)
    )
