"""The loop over a fake executor: tokens, overlap, ends, failures, and page safety throughout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapeout.runtime.scheduler.request import FinishReason


def limits_strategy() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "tokens_per_page": st.integers(1, 5),
            "num_pages": st.integers(24, 60),
            "max_batch_size": st.integers(1, 6),
            "max_num_tokens": st.integers(1, 14),
            "chunk_tokens": st.none() | st.integers(1, 9),
            "max_seq_len": st.just(24),
        }
    )


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 22), min_size=1, max_size=12),  # prompt
        st.integers(1, 12),  # max_tokens
        st.integers(0, 6),  # arrives after this many steps
        st.none() | st.integers(0, 9),  # aborted this many steps later
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=80)
@given(options=limits_strategy(), requests=REQUESTS)
def test_any_mix_of_requests(fakes: SimpleNamespace, options: dict[str, Any], requests: list[Any]) -> None:
    """Every request ends with exactly the ids it gets alone, in any company, chunking and order."""
    rig = fakes.make_rig(**options)
    todo = sorted(enumerate(requests), key=lambda item: (item[1][2], item[0]))
    sinks: dict[int, Any] = {}
    aborts: list[tuple[int, str, int]] = []
    for step in range(3_000):
        while todo and todo[0][1][2] <= step:
            index, (prompt, max_tokens, _, abort) = todo.pop(0)
            request_id = f"r{len(rig.requests)}"
            sinks[index] = rig.add(prompt, max_tokens, watched=index % 2 == 0)
            if abort is not None:
                aborts.append((step + abort, request_id, index))
        for when, request_id, _ in aborts:
            if when == step:
                rig.loop.abort(request_id)
        busy = rig.loop.step()
        rig.check_pages()
        if not busy and not todo:
            break
    assert not rig.loop.has_work
    rig.check_idle()
    aborted = {index for _, _, index in aborts}
    for index, (prompt, max_tokens, _, _) in enumerate(requests):
        sink, expected = sinks[index], fakes.expected_ids(prompt, max_tokens)
        if sink.finish.reason is FinishReason.ABORT:
            assert index in aborted
            assert sink.token_ids == expected[: len(sink.token_ids)]
            continue
        assert sink.token_ids == expected
        ended = FinishReason.STOP if expected[-1] == fakes.EOS else FinishReason.LENGTH
        assert sink.finish.reason is ended


@settings(max_examples=40)
@given(options=limits_strategy(), requests=REQUESTS)
@example(  # one row a step, and the request that ran in the step before has ended
    options={
        "tokens_per_page": 1,
        "num_pages": 24,
        "max_batch_size": 3,
        "max_num_tokens": 1,
        "chunk_tokens": None,
        "max_seq_len": 24,
    },
    requests=[([1], 2, 0, None), ([1], 2, 0, None), ([1, 1], 1, 0, None)],
)
def test_running_requests_advance(
    fakes: SimpleNamespace, options: dict[str, Any], requests: list[Any]
) -> None:
    """A decoding request waits a bounded number of steps; waiting context gets a row every other."""
    rig = fakes.make_rig(**options)
    for prompt, max_tokens, _, _ in requests:
        rig.add(prompt, max_tokens)
    rig.run()
    batch, budget = options["max_batch_size"], options["max_num_tokens"]
    bound = 2 * -(-batch // max(budget - 1, 1)) + 1
    waited: dict[str, int] = {}
    steps_without_context = 0
    for record in rig.records:
        plan = record.plan
        assert plan.num_tokens <= budget
        skipped = {s.request_id for s in plan.skipped if s.reason.name == "NO_BUDGET"}
        waited = {r: waited.get(r, 0) + 1 for r in skipped}
        context_waits = any(
            rig.requests[r].prompt_tokens > 0 and not _has_decoded(rig, r, plan.step) for r in skipped
        )
        steps_without_context = steps_without_context + 1 if context_waits and not plan.context else 0
        assert steps_without_context <= 1
        for request_id in skipped:
            if _has_decoded(rig, request_id, plan.step):
                assert waited[request_id] <= bound


def _has_decoded(rig: Any, request_id: str, before: int) -> bool:
    """Whether the request's prompt was complete before a step."""
    return any(
        s.request_id == request_id and s.samples
        for record in rig.records
        if record.plan.step < before
        for s in record.plan.scheduled
    )


def test_next_step_is_submitted_before_a_step_is_read(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig()
    rig.add([1, 2, 3], 6, eos=frozenset())
    rig.run()
    events = rig.executor.events
    for step in range(5):
        assert events.index(("submit", step + 1)) < events.index(("read", step))


def test_end_by_length_runs_no_surplus_row(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig()
    rig.add([1, 2, 3], 6, eos=frozenset())
    rig.run()
    assert len(rig.executor.steps) == 6  # the prompt's step gives the first token
    assert rig.loop.stats().surplus_rows == 0


def test_end_by_id_drops_its_surplus_row(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(script=lambda tokens: 5 if len(tokens) < 6 else 0)
    sink = rig.add([1, 2, 3], 20)
    rig.run()
    assert sink.token_ids == [5, 5, 5, 0]
    assert rig.loop.stats().surplus_rows == 1
    assert len(rig.executor.steps) == 5


def test_stop_id_and_stop_string_end_a_request(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(script=len)
    by_id = rig.add([1, 2, 3], 20, stop_token_ids=frozenset({5}))
    by_text = rig.add([1, 2, 3], 20, stop_after=4)
    below_min = rig.add([1, 2, 3], 6, stop_token_ids=frozenset({4}), params={"min_tokens": 3})
    rig.run()
    assert (by_id.token_ids, by_id.finish.stop_reason) == ([3, 4, 5], 5)
    assert (by_text.token_ids, by_text.finish.stop_reason) == ([3, 4, 5, 6], "STOP")
    assert below_min.token_ids == [3, 4, 5, 6, 7, 8]
    assert below_min.finish.reason is FinishReason.LENGTH


def test_requests_join_and_leave_while_others_run(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(script=lambda tokens: 5, max_batch_size=2)
    long, short = rig.add([1], 12), rig.add([1, 2], 3)
    late = rig.add([1, 2, 3], 3)
    rig.run()
    assert [len(s.token_ids) for s in (long, short, late)] == [12, 3, 3]
    in_company = [r for r in rig.records if {s.request_id for s in r.plan.scheduled} >= {"r0", "r2"}]
    assert in_company, "the late request must run beside the long one"
    assert rig.records[0].held.reason() == "waiting: max_batch_size is reached, all 2 slots are taken"


@pytest.mark.parametrize("where", ["fail_steps", "refuse_steps"])
def test_a_failing_step_fails_its_requests_only(fakes: SimpleNamespace, where: str) -> None:
    rig = fakes.make_rig(**{where: frozenset({2})})
    failed = rig.add([1, 2, 3], 8, eos=frozenset())
    while not (failed.finish is not None):
        rig.loop.step()
        rig.check_pages()
    later = rig.add([4, 5], 5, eos=frozenset())
    rig.run()
    assert failed.finish.reason is FinishReason.ERROR
    assert "scripted" in failed.finish.stop_reason
    assert later.token_ids == fakes.expected_ids([4, 5], 5, eos=-1)
    assert rig.loop.stats().failed_steps == 1


def test_non_finite_logits_fail_one_request(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(nan_when=lambda tokens: tokens[0] == 9 and len(tokens) == 4)
    bad, good = rig.add([9, 1], 8, eos=frozenset()), rig.add([3, 1], 8, eos=frozenset())
    rig.run()
    assert bad.finish.reason is FinishReason.ERROR
    assert "not finite" in bad.finish.stop_reason
    assert len(bad.token_ids) == 2
    assert good.token_ids == fakes.expected_ids([3, 1], 8, eos=-1)


def test_abort_frees_pages_within_two_steps(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig()
    sink, other = rig.add([1, 2, 3], 30, eos=frozenset()), rig.add([1], 30, eos=frozenset())
    for _ in range(4):
        rig.loop.step()
    assert rig.loop.abort("r0")
    assert sink.finish.reason is FinishReason.ABORT
    for _ in range(2):
        rig.loop.step()
    cached_tokens = int(rig.loop.running.cached_tokens[rig.requests["r1"].slot])
    pages = rig.loop.kv_cache.pages_for(cached_tokens)
    assert rig.loop.stats().kv_pages_used == pages
    assert not rig.loop.abort("r0")
    rig.run()
    assert len(other.token_ids) == 30


def test_on_step_may_end_requests_of_its_step(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(num_pages=20)
    sinks = [rig.add([start, 2, 3], 8, eos=frozenset()) for start in (1, 2, 3)]

    def end_two(record: Any) -> None:
        if record.plan.step == 0:  # their prompts
            rig.loop.abort("r0")
        if record.plan.step == 2:
            rig.loop.abort("r2")

    rig.loop.on_step = end_two
    rig.run()
    assert [rig.requests[f"r{i}"].finish.reason for i in range(3)] == [
        FinishReason.ABORT, FinishReason.LENGTH, FinishReason.ABORT,
    ]  # fmt: skip
    assert sinks[1].token_ids == fakes.expected_ids([2, 2, 3], 8, eos=-1)
    stats = rig.loop.stats()
    assert (stats.failed_steps, stats.kv_pages_used) == (0, 0)


def test_on_step_that_raises_loses_no_step(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(num_pages=20)
    sink = rig.add([1, 2, 3], 8, eos=frozenset())
    told = []

    def raise_once(record: Any) -> None:
        told.append(record.plan.step)
        if len(told) == 3:
            raise ValueError("of the caller")

    rig.loop.on_step = raise_once
    with pytest.raises(ValueError, match="of the caller"):
        rig.run()
    rig.run()
    assert sink.token_ids == fakes.expected_ids([1, 2, 3], 8, eos=-1)
    assert told == list(range(len(told)))
    assert rig.loop.stats().kv_pages_used == 0


def test_a_small_request_is_not_starved_by_large_ones(fakes: SimpleNamespace) -> None:
    """First come first served: admitted once those before it have ended, and the record says why."""
    rig = fakes.make_rig(num_pages=8, max_batch_size=4)
    rig.add([1] * 8, 20, eos=frozenset())
    rig.add([2] * 8, 20, eos=frozenset())
    small = rig.add([3], 2, eos=frozenset())
    rig.run()
    assert len(small.token_ids) == 2
    assert "worst case 7 pages, 1 uncommitted" in rig.records[0].held.reason()
    assert any("waiting" in line for line in rig.records[0].explain())


def test_an_interrupt_while_waiting_loses_nothing(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig()
    sink = rig.add([1, 2, 3], 6, eos=frozenset())
    rig.loop.step()
    read = rig.executor.read

    def interrupted(index: int) -> Any:
        rig.executor.read = read
        raise KeyboardInterrupt

    rig.executor.read = interrupted
    with pytest.raises(KeyboardInterrupt):
        rig.loop.step()
    rig.run()
    assert sink.token_ids == fakes.expected_ids([1, 2, 3], 6, eos=-1)


def test_tokens_nobody_watches_are_handed_over_when_asked_for_and_at_the_end(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig()
    asked = rig.add([1, 2, 3], 8, eos=frozenset(), watched=False)
    other = rig.add([4], 8, eos=frozenset(), watched=False)
    for _ in range(4):
        rig.loop.step()
    assert asked.token_ids == other.token_ids == []
    rig.loop.hand_over("r0")
    rig.loop.hand_over("r0")
    assert asked.token_ids == fakes.expected_ids([1, 2, 3], 3, eos=-1)
    assert other.token_ids == []
    rig.run()
    assert asked.token_ids == fakes.expected_ids([1, 2, 3], 8, eos=-1)
    assert other.token_ids == fakes.expected_ids([4], 8, eos=-1)
    rig.loop.hand_over("r0")  # has ended, and is not known any more
    rig.loop.hand_over("r7")


@pytest.mark.parametrize("asked", [True, False])
def test_a_sink_that_fails_ends_its_request_only(fakes: SimpleNamespace, asked: bool) -> None:
    rig = fakes.make_rig()
    bad = rig.add([1, 2, 3], 5, eos=frozenset(), watched=False)
    good = rig.add([4, 5], 5, eos=frozenset(), watched=False)

    def fail(token_ids: list[int], ending: bool) -> None:
        raise ValueError("scripted")

    bad.on_tokens = fail
    for _ in range(3):
        rig.loop.step()
    if asked:
        rig.loop.hand_over("r0")
        assert bad.finish is not None
    rig.run()
    assert (bad.finish.reason, bad.finish.stop_reason) == (FinishReason.ERROR, "ValueError: scripted")
    assert good.token_ids == fakes.expected_ids([4, 5], 5, eos=-1)


def test_ids_that_end_one_request_do_not_end_another(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(script=len)
    options = {"eos": frozenset(), "watched": False}
    ended = rig.add([1, 2, 3], 9, stop_token_ids=frozenset({5}), **options)
    later = rig.add([1, 2, 3], 9, stop_token_ids=frozenset({5, 7}), params={"min_tokens": 4}, **options)
    never = rig.add([1, 2, 3], 9, **options)
    rig.run()
    assert [len(s.token_ids) for s in (ended, later, never)] == [3, 5, 9]
    assert [s.finish.stop_reason for s in (ended, later, never)] == [5, 7, None]
