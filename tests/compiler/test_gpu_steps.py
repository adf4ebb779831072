"""Whole steps: which ops stand in them, who decides on which, and what an answer is worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fake_kernels import FakeTactic, compile_nothing

from tapeout.compiler import cuda_plan
from tapeout.compiler.cuda_plan import choose_cuda
from tapeout.compiler.report import ALONE, IN_A_STEP, StepTiming
from tapeout.compiler.tactics import gpu_pack
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings, StepOutcome, plan_digest
from tapeout.compiler.tactics.gpu_contests import Contest, contests
from tapeout.compiler.tactics.gpu_pack import make_pack
from tapeout.compiler.tactics.gpu_select import TimedChoices, Unanswered, choose_timed, unanswered
from tapeout.compiler.tactics.gpu_steps import StepContest, step_contests
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.case import cases
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import CudaTarget
from tapeout.plugins.errors import UsageError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.tactic_timer.pack import WholeStep

LIMITS = Limits(max_batch_size=2, max_num_tokens=4, max_seq_len=64, tokens_per_page=16)
TARGET = CudaTarget(90, 132, 232448, 16)
GPU = Gpu("NVIDIA H200", 90, 132, 141)
FLOATS = TensorType("float32", ("T", 16))
ROWS = TensorType("float32", ("R", 16))
NORM = OpSignature("add", (FLOATS,) * 2, (), (FLOATS,))
ATTENTION = next(c.signature for c in cases("rope_attention") if "float32 decode" in c.label)
SELECT = OpSignature("select_rows", (FLOATS, TensorType("int32", ("R",))), (), (ROWS,))
HEAD = OpSignature("mul", (ROWS,) * 2, (), (ROWS,))
SIGNATURES = {"norm": NORM, "attention": ATTENTION, "select": SELECT, "head": HEAD}
LAYER = ["attention", "norm", "norm"]


@dataclass
class Played:
    """Contests of the ops with two tactics each, and what is known of them."""

    decisions: tuple[Contest, ...]
    steps: tuple[StepContest, ...]
    timings: GpuTimings

    def know(self, **times: float) -> Played:
        """Times of all contests, by the tactic's name."""
        for contest in self.decisions:
            for c in contest.contenders:
                place = (contest.key, contest.kind, contest.conditions, contest.rows)
                self.timings.put(*place, c.kernel_hash, c.name, Outcome(times[c.name]))
        return self

    def hash_of(self, contest: Contest, name: str) -> str:
        return next(c.kernel_hash for c in contest.contenders if c.name == name)

    def answer(self, step: StepContest, outcome: StepOutcome | None = None, **winners: str) -> Played:
        """What timing the step has told: winners by op, else the fastest alone."""
        times: dict[str, dict[str, float]] = {}
        hashes = {}
        for key, contest in step.distinct().items():
            place = (contest.key, contest.kind, contest.conditions, contest.rows)
            known = {c.kernel_hash: self.timings.get(*place, c.kernel_hash) for c in contest.contenders}
            times[key] = {h: o.time_us for h, o in known.items() if o is not None and o.time_us is not None}
            best = min(times[key], key=lambda h: (times[key][h], h))
            hashes[key] = self.hash_of(contest, winners[key]) if key in winners else best
        plans = plan_digest(times, step.fixed)
        outcome = outcome or StepOutcome(90.0, 100.0, hashes)
        self.timings.put_step(step.order, step.kind, step.conditions, step.rows, plans, outcome)
        return self

    def step(self, kind: str, rows: int) -> StepContest:
        return next(s for s in self.steps if (s.kind, s.rows) == (kind, rows))

    def choose(self, **how: Any) -> TimedChoices:
        invariant = bool(how.pop("batch_invariant", False))
        defaults = choose_cuda(SIGNATURES, LIMITS, TARGET, batch_invariant=invariant)
        return choose_timed(
            self.decisions, self.timings, defaults, batch_invariant=invariant, **{"steps": self.steps, **how}
        )

    def open(self) -> Unanswered:
        return unanswered(self.decisions, self.timings, "", self.steps)


Play = Callable[..., Played]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    tactics = (FakeTactic("even"), FakeTactic("quick"))
    own = (*tactics, FakeTactic("split", decode_only=True))
    monkeypatch.setattr(cuda_plan, "cuda_tactics", lambda op: own if op == "rope_attention" else tactics)

    def make(layers: int = 2, limits: Limits = LIMITS) -> Played:
        decisions = contests(SIGNATURES, limits, TARGET)
        order = ["norm", *LAYER * layers, "select", "head"]
        steps = step_contests(SIGNATURES, order, decisions, limits)
        return Played(decisions, steps, GpuTimings(TimingCache(None), GPU))

    return make


def ranges(timed: TimedChoices, key: str, kind: str = "mixed") -> list[tuple[int, str]]:
    return [(c.rows, c.tactic.name) for c in getattr(timed.choices, kind).get(key, ())]


class TestContests:
    def test_buckets(self, play: Play) -> None:
        limits = replace(LIMITS, max_batch_size=3, max_num_tokens=5000)
        found = [(s.kind, s.rows) for s in play(limits=limits).steps]
        assert found[:3] == [("decode", 1), ("decode", 2), ("decode", 3)]
        assert found[3:] == [("mixed", 1 << i) for i in range(12)]  # not those of 4096 and 5000 rows

    @pytest.mark.parametrize(("layers", "kept"), [(1, 1), (2, 2), (4, 4), (5, 4), (32, 4)])
    def test_a_few_layers_stay_with_their_neighbours(self, play: Play, layers: int, kept: int) -> None:
        steps = play(layers).steps
        assert {step.order for step in steps} == {("norm", *LAYER * kept, "select", "head")}

    def test_layers_of_several_kinds_stay(self, play: Play) -> None:
        """As of a model that looks through windows in most layers."""
        played = play()
        windowed = {**SIGNATURES, "windowed": ATTENTION}
        decisions = (*played.decisions, *(replace(c, key="windowed") for c in _of(played, "attention")))
        order = [*["windowed", "norm"] * 5, "attention", "norm"] * 4
        step = step_contests(windowed, order, decisions, LIMITS)[0]
        assert step.order == ("windowed", "norm") * 3 + ("attention", "norm") * 3

    def test_who_decides(self, play: Play) -> None:
        played = play()
        decode = played.step("decode", 2)
        places = {key: (c.kind, c.rows) for key, c in decode.distinct().items()}
        assert places == {
            "norm": ("mixed", 2), "attention": ("decode", 2), "select": ("mixed", 2), "head": ("mixed", 2)
        }  # fmt: skip
        assert decode.fixed == set()
        mixed = played.step("mixed", 4)
        places = {key: (c.kind, c.rows) for key, c in mixed.distinct().items()}
        assert places == {
            "norm": ("mixed", 4), "attention": ("mixed", 4), "select": ("mixed", 2), "head": ("mixed", 2)
        }  # fmt: skip
        assert mixed.fixed == {"select", "head"}
        assert mixed.conditions.endswith("cached 1024; 2 logit rows")

    def test_a_decode_bucket_between_those_of_mixed_steps(self, play: Play) -> None:
        """Three requests: a step pads to three rows, of which other ops have no contest."""
        played = play(limits=replace(LIMITS, max_batch_size=3))
        places = {key: (c.kind, c.rows) for key, c in played.step("decode", 3).distinct().items()}
        assert places == {
            "norm": ("mixed", 4), "attention": ("decode", 3), "select": ("mixed", 3), "head": ("mixed", 3)
        }  # fmt: skip

    def test_without_an_order_there_are_none(self, play: Play) -> None:
        assert step_contests(SIGNATURES, (), play().decisions, LIMITS) == ()


class TestPack:
    def test_steps_name_entries(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu_pack, "compile_all", compile_nothing)
        played = play(1)
        decisions = [c for c in played.decisions if c.rows == 2]
        step = played.step("mixed", 2)
        monkeypatch.setattr(gpu_pack, "expected", lambda *_: ())
        pack = make_pack(decisions, LIMITS, TARGET, "cuda:h200", steps=[step]).pack
        assert [(e.signature, e.kind) for e in pack.entries] == [
            ("norm", "mixed"), ("attention", "mixed"), ("attention", "decode"), ("select", "mixed"),
            ("head", "mixed"),
        ]  # fmt: skip
        assert pack.steps == (WholeStep("mixed", step.conditions, 2, (0, 1, 0, 0, 3, 4), (3, 4)),)


class TestChoice:
    TIMES = {"even": 10.0, "quick": 9.0, "split": 20.0}  # noqa: RUF012

    def test_winners_of_a_step_run(self, play: Play) -> None:
        played = play().know(**self.TIMES)
        timed = played.answer(played.step("mixed", 4), norm="even").choose()
        assert ranges(timed, "norm") == [(2, "quick"), (4, "even")]
        assert ranges(timed, "attention") == [(4, "quick")]
        assert timed.timed
        told = {(t.signature, t.rows): t for t in timed.timings if t.kind == "mixed"}
        norm = told["norm", 4]
        assert (norm.tactic, norm.time_us, norm.losers, norm.chosen) == ("even", 10, {"quick": 9}, IN_A_STEP)
        assert told["attention", 4].chosen == IN_A_STEP
        assert told["norm", 2].chosen == told["head", 2].chosen == ALONE
        # Both norms of both layers and the first one, of nine ops.
        assert timed.steps == (StepTiming("mixed", 4, 90, 100, 5, 9),)
        assert timed.steps[0].text() == (
            "step of 4 rows, mixed: 100.0 us with the fastest alone, 90.0 us (10.0% less) with others for "
            "5 of 9 ops"
        )

    def test_decode_steps_have_ranges_of_their_own_where_they_differ(self, play: Play) -> None:
        played = play().know(**self.TIMES)
        played.answer(played.step("decode", 1), attention="even").answer(
            played.step("decode", 2), norm="even"
        )
        timed = played.choose()
        assert ranges(timed, "norm") == [(4, "quick")]
        assert ranges(timed, "norm", "decode") == [(1, "quick"), (2, "even")]
        assert ranges(timed, "attention", "decode") == [(1, "even"), (2, "quick")]
        assert ranges(timed, "head", "decode") == ranges(timed, "select", "decode") == []
        told = {(t.signature, t.kind, t.rows): t.chosen for t in timed.timings}
        assert told["norm", "decode", 2] == told["norm", "decode", 1] == IN_A_STEP
        assert told["norm", "mixed", 2] == ALONE
        assert (timed.defaults, timed.contests) == (0, len(played.decisions))

    def test_what_a_mixed_step_has_won_serves_others(self, play: Play) -> None:
        """A decode step that was not timed runs what serves as many rows."""
        played = play().know(**self.TIMES)
        played.answer(played.step("mixed", 1), norm="even").answer(played.step("decode", 2), norm="even")
        timed = played.choose()
        assert ranges(timed, "norm") == [(1, "even"), (4, "quick")]
        assert ranges(timed, "norm", "decode") == [(2, "even")]

    def test_logit_rows_are_decided_in_decode_steps(self, play: Play) -> None:
        played = play().know(**self.TIMES)
        timed = played.answer(played.step("mixed", 4), head="even").choose()
        assert ranges(timed, "head") == [(2, "quick")]
        timed = played.answer(played.step("decode", 2), head="even").choose()
        assert ranges(timed, "head") == [(2, "quick")]
        assert ranges(timed, "head", "decode") == [(1, "quick"), (2, "even")]

    def test_an_answer_is_of_its_finalists(self, play: Play) -> None:
        """Who has become as fast alone was not in that step; who is far behind does not matter."""
        played = play().know(even=10.0, quick=9.0, split=20.0)
        step = played.step("decode", 2)
        played.answer(step, norm="even")
        assert ranges(played.know(even=10.0, quick=9.0, split=15.0).choose(), "norm", "decode")
        assert step not in played.open().steps
        assert not ranges(played.know(even=10.0, quick=9.0, split=9.5).choose(), "norm", "decode")
        assert step in played.open().steps

    def test_a_winner_that_does_not_compete_any_more(self, play: Play) -> None:
        """As in a cache that somebody edited."""
        played = play().know(**self.TIMES)
        step = played.step("mixed", 4)
        hashes = dict.fromkeys(step.order, "gone")
        timed = played.answer(step, StepOutcome(90.0, 100.0, hashes)).choose()
        assert ranges(timed, "norm") == [(4, "quick")]
        assert timed.steps == ()

    def test_a_step_that_cannot_run_changes_nothing(self, play: Play) -> None:
        played = play().know(**self.TIMES)
        step = played.step("mixed", 4)
        timed = played.answer(step, StepOutcome(None, reason="hangs")).choose()
        assert {t.chosen for t in timed.timings} == {ALONE}
        assert timed.steps == (StepTiming("mixed", 4, None, reason="hangs"),)
        assert timed.steps[0].text() == "step of 4 rows, mixed: not timed: hangs"
        assert step not in played.open().steps

    def test_who_asks_for_other_tactics_gets_them(self, play: Play) -> None:
        played = play().know(**self.TIMES)
        before = [played.choose(batch_invariant=True), played.choose(preferred="native")]
        for step in played.steps:
            played.answer(step, norm="even")
        after = [played.choose(batch_invariant=True), played.choose(preferred="native")]
        assert [ranges(t, "norm") for t in after] == [[(4, "quick")]] * 2
        assert after == before
        assert [ranges(played.choose(), "norm")] == [[(4, "even")]]


class TestUnanswered:
    def test_nothing_is_known(self, play: Play) -> None:
        played = play()
        assert played.open() == Unanswered(played.decisions, played.steps)

    def test_a_step_takes_its_contests_along(self, play: Play) -> None:
        played = play().know(even=10.0, quick=9.0, split=20.0)
        assert played.open() == Unanswered(played.decisions, played.steps)
        for step in played.steps[:-1]:
            played.answer(step)
        open_ = played.open()
        assert [(s.kind, s.rows) for s in open_.steps] == [("mixed", 4)]
        found = {(c.key, c.kind, c.rows) for c in open_.contests}
        assert found == {(c.key, c.kind, c.rows) for c in played.step("mixed", 4).contests}
        assert played.answer(played.steps[-1]).open() == Unanswered((), ())

    def test_a_contest_takes_its_steps_along(self, play: Play) -> None:
        """Somebody new may be a finalist."""
        played = play().know(even=10.0, quick=9.0, split=20.0)
        for step in played.steps:
            played.answer(step)
        contest = played.step("decode", 1).distinct()["attention"]
        entry = played.timings._cache.entries[played.timings._key("attention", "decode", contest.conditions)]
        del entry["rows"]["1"][played.hash_of(contest, "split")]
        open_ = played.open()
        assert open_.steps == (played.step("decode", 1),)
        assert len(open_.contests) == 4
        assert all(c in played.step("decode", 1).contests for c in open_.contests)

    def test_ops_that_all_have_lost_leave_nothing_to_time(self, play: Play) -> None:
        played = play().know(even=10.0, quick=9.0, split=20.0)
        for contest in _of(played, "norm"):
            for c in contest.contenders:
                place = (contest.key, contest.kind, contest.conditions, contest.rows)
                played.timings.put(*place, c.kernel_hash, c.name, Outcome(None, "differs"))
        assert played.open() == Unanswered((), ())


class TestCache:
    STEP = (["a", "b", "a"], "decode", "batch 2", 8, "plans")
    OUTCOME = StepOutcome(90.5, 100.25, {"a": "hash", "b": "other"})

    def test_what_is_put_is_got(self, tmp_path: Path) -> None:
        path = tmp_path / "gpus.json"
        cache = TimingCache.load(path)
        GpuTimings(cache, GPU).put_step(*self.STEP, self.OUTCOME)
        lost = StepOutcome(None, reason="hangs")
        GpuTimings(cache, GPU).put_step(*self.STEP[:4], "others", lost)
        cache.save()
        timings = GpuTimings(TimingCache.load(path), GPU)
        assert timings.get_step(*self.STEP) == self.OUTCOME
        assert timings.get_step(*self.STEP[:4], "others") == lost
        (entry,) = json.loads(path.read_text())["entries"].values()
        assert entry["order"] == ["a", "b", "a"]
        assert json.loads(path.read_text())["version"] == 1

    @pytest.mark.parametrize("part", range(5))
    def test_anything_else_is_unknown(self, part: int) -> None:
        timings = GpuTimings(TimingCache(None), GPU)
        timings.put_step(*self.STEP, self.OUTCOME)
        other: list[Any] = list(self.STEP)
        other[part] = [["a", "b"], "mixed", "batch 3", 16, "others"][part]
        assert timings.get_step(*other) is None
        assert GpuTimings(timings._cache, replace(GPU, sm_count=78)).get_step(*self.STEP) is None

    @pytest.mark.parametrize(
        "change",
        [{"winners": None}, {"winners": {"a": 1}}, {"alone_us": None}, {"alone_us": -1}, {"alone_us": "x"}],
    )
    def test_a_damaged_one_is_refused(self, tmp_path: Path, change: dict[str, Any]) -> None:
        path = tmp_path / "gpus.json"
        cache = TimingCache(path)
        GpuTimings(cache, GPU).put_step(*self.STEP, self.OUTCOME)
        (entry,) = cache.entries.values()
        entry["rows"]["8"]["plans"] |= change
        path.write_text(json.dumps({"version": 1, "entries": cache.entries}))
        with pytest.raises(UsageError, match=r"does not hold times of steps with their winners"):
            TimingCache.load(path)


def _of(played: Played, key: str) -> Sequence[Contest]:
    return [c for c in played.decisions if c.key == key]
