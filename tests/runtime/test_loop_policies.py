"""The loop where policies show: pausing, turns without overlap, priorities, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tapeout.runtime.scheduler.policies import PRIORITY_STEPS, CapacityPolicy
from tapeout.runtime.scheduler.request import FinishReason

# ---- pages run out --------------------------------------------------------------------------

PRESSED = {
    "num_pages": 12,
    "tokens_per_page": 2,
    "max_batch_size": 4,
    "max_seq_len": 24,
    "capacity_policy": CapacityPolicy.MAX_UTILIZATION,
}


@pytest.mark.parametrize("overlap", [True, False])
def test_the_newest_is_paused_and_runs_again_before_newer_ones(fakes: SimpleNamespace, overlap: bool) -> None:
    rig = fakes.make_rig(**PRESSED, overlap=overlap, script=len)
    options = {"eos": frozenset()}
    sinks = [rig.add([i + 1] * 4, 12, watched=i % 2 == 0, **options) for i in range(5)]
    rig.run()
    paused = [p.request_id for r in rig.records for p in r.paused]
    assert paused
    assert "r0" not in paused, "the oldest runs on"
    begins = [a.request_id for r in rig.records for a in r.admitted]
    for i, name in enumerate(begins):
        assert all(int(name[1:]) <= int(later[1:]) or later in paused for later in begins[i:])
    assert [s.token_ids for s in sinks] == [list(range(4, 16))] * 5
    stats = rig.loop.stats()
    assert stats.pauses == len(paused)
    # What was computed beyond the prompts was computed again, or was sampled before and is context now.
    resumed = [a for r in rig.records for a in r.admitted if a.resumed]
    assert len(resumed) == len(paused)
    assert stats.recomputed_tokens == sum(a.recompute_tokens for a in resumed) > 0
    assert stats.prompt_tokens == 5 * 4 + stats.recomputed_tokens + len(resumed)
    assert stats.generation_tokens == 5 * 12
    assert any("gives back" in line for r in rig.records for line in r.explain())
    assert any("are computed again" in line for r in rig.records for line in r.explain())


def test_a_request_can_be_aborted_while_it_is_being_paused_and_while_it_waits(fakes: SimpleNamespace) -> None:
    for when in (0, 1):
        rig = fakes.make_rig(**PRESSED, script=len)
        sinks = [rig.add([1] * 4, 12, eos=frozenset(), watched=False) for _ in range(3)]
        while not any(r.paused for r in rig.records):
            rig.loop.step()
        for _ in range(when):
            rig.loop.step()
        name = next(p.request_id for r in rig.records for p in r.paused)
        assert rig.loop.abort(name)
        sink = rig.sinks[name]
        assert sink.finish.reason is FinishReason.ABORT
        assert sink.token_ids == list(range(4, 4 + len(sink.token_ids)))
        assert sink.token_ids, "what was generated before the pause is kept"
        rig.run()
        others = [s for s in sinks if s is not sink]
        assert [s.token_ids for s in others] == [list(range(4, 16))] * 2


def test_a_sink_that_fails_when_its_request_is_paused(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(**PRESSED, script=len)
    sinks = [rig.add([1] * 4, 12, eos=frozenset(), watched=False) for _ in range(3)]

    def fail(token_ids: list[int], ending: bool) -> None:
        raise ValueError("scripted")

    sinks[2].on_tokens = fail
    rig.run()
    assert sinks[2].finish.stop_reason == "ValueError: scripted"
    assert [len(s.token_ids) for s in sinks[:2]] == [12, 12]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_consumer_may_end_others_while_its_request_is_paused(fakes: SimpleNamespace, overlap: bool) -> None:
    """They are being paused, too: each gives back slot and pages once."""
    rig = fakes.make_rig(script=len, overlap=overlap)
    sinks = [rig.add([1] * 4, 12, eos=frozenset(), watched=False) for _ in range(3)]
    for _ in range(4):
        rig.loop.step()
    keep = sinks[2].on_tokens

    def end_others(token_ids: list[int], ending: bool) -> None:
        keep(token_ids, ending)
        rig.loop.abort("r0")
        rig.loop.abort("r1")

    sinks[2].on_tokens = end_others
    rig.loop.pause_all()
    rig.check_pages()
    rig.run()
    ends = [s.finish.reason for s in sinks]
    assert ends == [FinishReason.ABORT, FinishReason.ABORT, FinishReason.LENGTH]
    assert sinks[2].token_ids == list(range(4, 16))
    assert rig.loop.stats().pauses == 3


def test_nobody_is_paused_for_a_page_worth_of_steps_after_an_admission(fakes: SimpleNamespace) -> None:
    options = {**PRESSED, "num_pages": 11, "tokens_per_page": 4, "max_num_tokens": 64, "overlap": False}
    rig = fakes.make_rig(**options, script=len)
    for i in range(12):
        rig.add([1] * (1 + i), 12, eos=frozenset())
    rig.run()
    assert any(r.paused for r in rig.records)
    admissions = [i for i, r in enumerate(rig.records) if r.admitted]
    pauses = [i for i, r in enumerate(rig.records) if r.paused]
    assert min(p - max(a for a in admissions if a <= p) for p in pauses) >= options["tokens_per_page"]


# ---- without overlap, priorities, refusals ----------------------------------------------------


def test_without_overlap_a_step_is_read_before_the_next_is_planned(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(overlap=False, script=lambda tokens: 5 if len(tokens) < 6 else 0)
    sink = rig.add([1, 2, 3], 20)
    rig.run()
    assert sink.token_ids == [5, 5, 5, 0]
    assert rig.executor.events == [(what, i) for i in range(4) for what in ("submit", "read")]
    assert rig.loop.stats().surplus_rows == 0


def test_priority_goes_first_for_as_many_steps_as_a_level_is_worth(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(max_batch_size=1, overlap=False)
    one = {"eos": frozenset()}
    rig.add([1], 2, **one)
    low = rig.add([1], 1, priority=-1, **one)
    rig.add([1], 1, **one)
    rig.add([1], 1, priority=1, **one)
    rig.run()
    begins = [a.request_id for r in rig.records for a in r.admitted]
    assert begins == ["r3", "r0", "r2", "r1"]
    assert low.token_ids
    # Who has waited as many steps as a level is worth is not overtaken any more.
    rig.add([1], 2, **one)
    rig.loop.step()
    waiting = rig.add([1], 1, **one)
    rank = rig.requests["r5"].rank
    rig.loop._next_step += PRIORITY_STEPS - 1
    rig.add([1], 1, priority=1, **one)
    rig.loop._next_step += 2
    rig.add([1], 1, priority=1, **one)
    ranks = [rig.requests[name].rank for name in ("r6", "r7")]
    assert ranks[0] < rank < ranks[1]
    assert waiting.finish is None


def test_what_can_never_fit_ends_at_once_and_blocks_nobody(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(num_pages=4, tokens_per_page=4)
    huge, small = rig.add([1] * 10, 7), rig.add([1, 2], 3, eos=frozenset())
    assert huge.finish.reason is FinishReason.ERROR
    assert huge.finish.stop_reason == (
        "10 prompt tokens and 7 to generate need 5 KV pages of 4 tokens; the pool has 4"
    )
    rig.run()
    assert len(small.token_ids) == 3


def test_a_fault_of_the_page_table_fails_the_step_and_the_loop_goes_on(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig()
    bad = rig.add([1, 2, 3], 5, eos=frozenset())
    grow = rig.loop.kv_cache.grow

    def fail(*args: Any) -> None:
        rig.loop.kv_cache.grow = grow
        raise MemoryError("scripted")

    rig.loop.kv_cache.grow = fail
    rig.loop.step()
    assert bad.finish.stop_reason == "MemoryError: scripted"
    good = rig.add([4, 5], 5, eos=frozenset())
    rig.run()
    assert good.token_ids == fakes.expected_ids([4, 5], 5, eos=-1)


def test_steps_can_be_skipped_only_while_nothing_runs(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig()
    rig.loop.skip_to(50)
    rig.add([1], 1, eos=frozenset())
    with pytest.raises(RuntimeError, match="step 60 cannot follow 49"):
        rig.loop.skip_to(60)
    rig.run()
    assert [r.plan.step for r in rig.records] == [50]
    assert rig.loop.stats().steps == 1
    with pytest.raises(RuntimeError, match="step 3 cannot follow"):
        rig.loop.skip_to(3)
