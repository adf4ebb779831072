"""Choosing tactics: only correct ones, the fastest by rows, from the timing cache where it knows."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tapeout.compiler.tactics.select as select
from tapeout.compiler.tactics import timing
from tapeout.compiler.tactics.cache import Machine, TimingCache
from tapeout.compiler.tactics.case import make_case, make_weights
from tapeout.compiler.tactics.select import Choices, choose_untimed, select_tactics
from tapeout.compiler.tactics.timing import Outcome, reference_outputs
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature, TensorType
from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program import TacticRange

HOST = HostCpu("x86_64_v2", 1)
MACHINE = Machine("cpu", "x86_64_v2", 1, "kernels", "2.13", "batch 4")
LIMITS = Limits(max_batch_size=4, max_num_tokens=16, max_seq_len=64, tokens_per_page=4)
ADD = OpSignature("add", (TensorType("float32", ("T", 8)),) * 2, (), (TensorType("float32", ("T", 8)),))
ROWS = [1, 2, 4, 8, 16]


class Fake(CpuTactic):
    """An addition; `wrong` adds that much, an `error` is raised while binding, a `refusal` beforehand."""

    op = "add"

    def __init__(self, name: str, *, wrong: float = 0.0, **faults: Any) -> None:
        self.name, self.wrong, self.faults = name, wrong, faults
        self.batch_invariant = faults.get("batch_invariant", True)
        self.bound = 0

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        return self.faults.get("refusal")

    def prepare(self, weights: Any, attrs: Any) -> Any:
        if "prepare" in self.faults:
            raise self.faults["prepare"]
        return weights

    def bind(self, call: BoundCall) -> Callable[[], None]:
        self.bound += 1
        if "error" in self.faults:
            raise self.faults["error"]
        (a, b), (out,) = call.inputs, call.outputs
        rows = self.faults.get("rows", len(out))
        return lambda: out[:rows].copy_(a[:rows] + b[:rows] + self.wrong)  # type: ignore[func-returns-value]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Choices]:
    """Chooses between the given tactics for ADD; `times` replaces measuring by a table {name: {rows: us}}."""

    def choose(
        *tactics: CpuTactic,
        cache: TimingCache | None = None,
        times: Mapping[str, Mapping[int, float]] | None = None,
        machine: Machine = MACHINE,
        batch_invariant: bool = False,
    ) -> Choices:
        monkeypatch.setattr(select, "cpu_tactics", lambda op: tactics)
        if times is not None:
            monkeypatch.setattr(
                select, "measure", lambda t, signature, case, *_: Outcome(times[t.name][case.rows])
            )
        return select_tactics(
            {ADD.key(): ADD},
            LIMITS,
            HOST,
            machine,
            cache if cache is not None else TimingCache(None),
            kernels=None,
            seed=0,
            batch_invariant=batch_invariant,
        )

    return choose


def ranges(choices: Choices) -> list[tuple[int, str]]:
    return [(r.max_rows, r.tactic) for r in choices.ranges[ADD.key()]]


def test_the_fastest_wins_and_equal_neighbours_merge(choose: Callable[..., Choices]) -> None:
    times = {
        "a": dict(zip(ROWS, [1, 1, 5, 5, 5], strict=True)),
        "b": dict(zip(ROWS, [2, 2, 2, 2, 9], strict=True)),
    }
    choices = choose(Fake("a"), Fake("b"), times=times)
    assert ranges(choices) == [(2, "a"), (8, "b"), (16, "a")]
    assert [t.rows for t in choices.timings] == ROWS
    third = choices.timings[2]
    assert (third.tactic, third.time_us, third.losers, third.rejected) == ("b", 2, {"a": 5}, {})


def test_one_winner_is_one_range(choose: Callable[..., Choices]) -> None:
    times = {"a": dict.fromkeys(ROWS, 1.0), "b": dict.fromkeys(ROWS, 1.0)}
    assert ranges(choose(Fake("b"), Fake("a"), times=times)) == [(16, "a")]  # a tie goes to the name


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (Fake("bad", wrong=1.0), "output out: 8 of 8 elements differ; worst at "),
        (Fake("bad", wrong=float("nan")), "output out: 8 of 8 elements differ; worst at "),
        (Fake("bad", rows=0), "output out: 8 of 8 elements differ; worst at "),  # writes nothing
        (Fake("bad", error=RuntimeError("no such kernel\nand more")), "RuntimeError: no such kernel"),
        (Fake("bad", prepare=MemoryError("too large")), "MemoryError: too large"),
        (Fake("bad", refusal="needs AVX-512"), "needs AVX-512"),
    ],
)
def test_a_wrong_tactic_is_never_chosen_and_the_reason_is_kept(
    choose: Callable[..., Choices], fake: Fake, reason: str
) -> None:
    choices = choose(fake, Fake("good"))
    assert ranges(choices) == [(16, "good")]
    assert len(choices.timings) == len(ROWS)
    assert choices.timings[0].rejected["bad"].startswith(reason)
    assert all("bad" in t.rejected and "bad" not in t.losers for t in choices.timings)


def test_a_tactic_may_be_wrong_at_some_rows_only(choose: Callable[..., Choices]) -> None:
    """Right up to 4 rows: it may win there and nowhere else."""
    choices = choose(Fake("few", rows=4), Fake("all"))
    winners = {t.rows: t.tactic for t in choices.timings}
    assert winners[8] == winners[16] == "all"
    assert [t.rows for t in choices.timings if "few" in t.rejected] == [8, 16]


def test_nothing_works(choose: Callable[..., Choices]) -> None:
    with pytest.raises(TapeoutError) as caught:
        choose(Fake("a", wrong=1.0), Fake("b", error=ValueError("no")))
    message = caught.value.message
    assert message.startswith(f"no tactic computes {ADD.key()} on this machine:\n")
    assert message.count("rows, a: output out: ") == len(ROWS)
    assert message.count("rows, b: ValueError: no") == len(ROWS)


@pytest.mark.parametrize("choose_with", ["timed", "untimed"])
def test_nothing_is_usable(
    choose: Callable[..., Choices], monkeypatch: pytest.MonkeyPatch, choose_with: str
) -> None:
    fakes = (Fake("a", refusal="no AVX"), Fake("b", batch_invariant=False))
    monkeypatch.setattr(select, "cpu_tactics", lambda op: fakes)

    def untimed() -> Choices:
        return choose_untimed({ADD.key(): ADD}, LIMITS, HOST, batch_invariant=True)

    def timed() -> Choices:
        return choose(*fakes, batch_invariant=True)

    with pytest.raises(TapeoutError, match=r"a: no AVX\n  b: its result for a row depends on the other rows"):
        {"timed": timed, "untimed": untimed}[choose_with]()


def test_untimed_choices_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = (Fake("a"), Fake("b"), Fake("c", refusal="no"))
    monkeypatch.setattr(select, "cpu_tactics", lambda op: fakes)
    choices = choose_untimed({ADD.key(): ADD}, LIMITS, HOST, batch_invariant=False)
    assert choices.ranges == {ADD.key(): (TacticRange(16, "b"),)}
    assert not choices.timed
    assert [f.bound for f in fakes] == [0, 0, 0]


class TestBatchInvariant:
    TIMES = {  # noqa: RUF012
        "fast": dict.fromkeys(ROWS, 1.0),
        "small": dict(zip(ROWS, [1, 1, 1, 1, 90], strict=True)),
        "even": dict.fromkeys(ROWS, 5.0),
    }

    def test_one_tactic_for_all_rows_among_the_invariant(self, choose: Callable[..., Choices]) -> None:
        fakes = (Fake("fast", batch_invariant=False), Fake("small"), Fake("even"))
        assert ranges(choose(*fakes, times=self.TIMES)) == [(16, "fast")]
        choices = choose(*fakes, times=self.TIMES, batch_invariant=True)
        assert ranges(choices) == [(16, "even")]  # 25 over all anchors, small takes 94
        assert "depends on the other rows" in choices.timings[0].rejected["fast"]

    def test_it_must_be_right_at_every_anchor(self, choose: Callable[..., Choices]) -> None:
        assert ranges(choose(Fake("few", rows=8), Fake("all"), batch_invariant=True)) == [(16, "all")]
        with pytest.raises(TapeoutError) as caught:
            choose(Fake("few", rows=8), Fake("none", wrong=1.0), batch_invariant=True)
        assert "16 rows, few: output out" in caught.value.message


class TestCache:
    def test_a_warm_cache_times_nothing(
        self, choose: Callable[..., Choices], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cold = TimingCache.load(tmp_path / "cache.json")
        first = choose(Fake("a"), Fake("b", wrong=1.0), cache=cold)
        assert (cold.hits, cold.misses) == (0, len(ROWS))
        cold.save()
        for name in ("measure", "make_case", "make_weights", "reference_outputs"):
            monkeypatch.setattr(select, name, lambda *_: pytest.fail("timed although the cache is warm"))
        warm = TimingCache.load(tmp_path / "cache.json")
        second = choose(Fake("a"), Fake("b", wrong=1.0), cache=warm)
        assert (warm.hits, warm.misses) == (len(ROWS), 0)
        assert second.ranges == first.ranges
        assert [replace(t, cached=False) for t in second.timings] == list(first.timings)
        assert all(t.cached for t in second.timings)
        assert not any(t.cached for t in first.timings)

    def test_what_decides_is_what_the_file_holds(
        self, choose: Callable[..., Choices], tmp_path: Path
    ) -> None:
        """A figure rounded only on the way into the file could make the warm build choose otherwise."""
        path = tmp_path / "cache.json"
        times = {"a": dict.fromkeys(ROWS, 1.2344999), "b": dict.fromkeys(ROWS, 1.2344991)}
        cold = TimingCache.load(path)
        first = choose(Fake("a"), Fake("b"), cache=cold, times=times)
        cold.save()
        second = choose(Fake("a"), Fake("b"), cache=TimingCache.load(path), times={})
        assert ranges(first) == ranges(second) == [(16, "b")]

    def test_real_times_are_rounded_before_they_decide(self, choose: Callable[..., Choices]) -> None:
        for told in choose(Fake("a"), Fake("b")).timings:
            for time_us in (told.time_us, *told.losers.values()):
                assert time_us == round(float(time_us), 3)

    @pytest.mark.parametrize("field", ["cpu", "level", "threads", "kernels", "torch", "conditions"])
    def test_another_machine_is_measured_anew(self, choose: Callable[..., Choices], field: str) -> None:
        cache = TimingCache(None)
        choose(Fake("a"), cache=cache)
        other = replace(MACHINE, **{field: 2 if field == "threads" else "other"})
        choose(Fake("a"), cache=cache, machine=other)
        assert (cache.hits, cache.misses) == (0, 2 * len(ROWS))

    def test_a_new_tactic_is_measured_anew(self, choose: Callable[..., Choices]) -> None:
        cache = TimingCache(None)
        choose(Fake("a"), cache=cache)
        choose(Fake("a"), Fake("b"), cache=cache)
        assert cache.misses == 2 * len(ROWS)
        choose(Fake("b"), cache=cache)  # a removed one does not matter
        assert cache.hits == len(ROWS)

    def test_nothing_new_is_not_written(self, choose: Callable[..., Choices], tmp_path: Path) -> None:
        path = tmp_path / "cache.json"
        cache = TimingCache.load(path)
        choose(Fake("a"), cache=cache)
        cache.save()
        stamp = path.stat().st_mtime_ns
        warm = TimingCache.load(path)
        choose(Fake("a"), cache=warm)
        warm.save()
        assert path.stat().st_mtime_ns == stamp

    def test_an_interrupted_save_leaves_the_old_file(
        self, choose: Callable[..., Choices], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "cache.json"
        path.write_text('{"version": 1, "entries": {}}')
        cache = TimingCache.load(path)
        choose(Fake("a"), cache=cache)

        def interrupted(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(json, "dumps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.save()
        assert path.read_text() == '{"version": 1, "entries": {}}'
        assert [p.name for p in tmp_path.iterdir()] == ["cache.json"]

    def test_a_folder_that_is_gone(self, choose: Callable[..., Choices], tmp_path: Path) -> None:
        cache = TimingCache.load(tmp_path / "gone" / "cache.json")
        choose(Fake("a"), cache=cache)
        with pytest.raises(UsageError, match=r"timing cache .*cache.json cannot be written"):
            cache.save()

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\xff\xfe",
            b"[]",
            b'{"entries": {}}',
            b'{"version": 2, "entries": {}}',
            b'{"version": 1, "entries": []}',
            b'{"version": 1, "entries": {"k": 3}}',
            b'{"version": 1, "entries": {"k": {"rows": []}}}',
            b'{"version": 1, "entries": {"k": {"rows": {"1": {"aten": {}}}}}}',
            b'{"version": 1, "entries": {"k": {"rows": {"1": {"aten": {"time_us": "fast"}}}}}}',
            b'{"version": 1, "entries": {"k": {"rows": {"1": {"aten": {"time_us": NaN}}}}}}',
            b'{"version": 1, "entries": {"k": {"rows": {"1": {"aten": {"time_us": 1%s}}}}}}' % (b"0" * 400),
            b'{"version": 1, "entries": ' + b"[" * 100_000,
        ],
    )
    def test_a_file_that_is_none_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "cache.json"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"cache\.json is not a timing cache: ") as caught:
            TimingCache.load(path)
        assert caught.value.hint is not None
        assert path.read_bytes() == content

    @pytest.mark.parametrize("content", ["[]", "{}", "3", '{"version": 1}', '{"entries": {}}'])
    def test_what_was_expected_is_told(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "cache.json"
        path.write_text(content)
        with pytest.raises(UsageError, match=r"it is no object with 'version' and 'entries'"):
            TimingCache.load(path)

    def test_a_file_that_is_not_there_is_empty(self, tmp_path: Path) -> None:
        assert TimingCache.load(tmp_path / "none.json").entries == {}
        assert TimingCache.load(None).entries == {}


class Clock:
    """Of a machine with other work; a call takes the next of `us`, and the last for ever.

    A negative one stands for a call that took as long and was interrupted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *us: float) -> None:
        self.now, self.interrupted, self.calls = 0.0, 0, 0
        self._us = us
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing, "_interruptions", lambda: self.interrupted)

    def call(self) -> None:
        us = self._us[min(self.calls, len(self._us) - 1)]
        self.calls += 1
        self.now += abs(us) * 1e-6
        self.interrupted += us < 0

    def fastest_us(self, best_us: float = math.inf) -> float:
        return timing._fastest_us([self.call], best_us)


class TestTiming:
    """How long a candidate is timed; times are in microseconds."""

    @pytest.mark.parametrize(("us", "calls"), [(1_000, 22), (8_000, 7), (500_000, 7), (1, 202)])
    def test_a_quiet_machine_takes_20_ms_and_5_passes_at_least(
        self, monkeypatch: pytest.MonkeyPatch, us: float, calls: int
    ) -> None:
        clock = Clock(monkeypatch, us)
        assert clock.fastest_us() == pytest.approx(us)
        assert clock.calls == calls

    def test_it_goes_on_until_the_fastest_passes_agree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One lucky pass is no time: another one must tell the same."""
        slow = [5_000.0 * 1.2**i for i in range(8)]
        clock = Clock(monkeypatch, 9_000, 9_000, *slow, 1_000, 6_000, 1_050, 1_000)
        assert clock.fastest_us() == pytest.approx(1_000)
        assert clock.calls == 2 + 8 + 3

    def test_time_slices_of_the_scheduler_are_no_times(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Threads that wait for one another on taken cores: all passes alike, all interrupted."""
        clock = Clock(monkeypatch, *[-8_000] * 20, 900)
        assert clock.fastest_us() == pytest.approx(900)
        assert clock.calls == 20 + 2

    def test_there_is_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(monkeypatch, -8_000)
        assert clock.fastest_us() == pytest.approx(8_000)
        assert clock.now < 0.35

    def test_a_hopeless_candidate_costs_two_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(monkeypatch, 9_000)
        assert clock.fastest_us(best_us=1_000) == pytest.approx(9_000)
        assert clock.calls == 2

    @pytest.mark.parametrize("first", [(-9_000, -9_000), (9_000, 7_000)])
    def test_who_was_only_interrupted_is_not_hopeless(
        self, monkeypatch: pytest.MonkeyPatch, first: tuple[float, ...]
    ) -> None:
        clock = Clock(monkeypatch, *first, 700)
        assert clock.fastest_us(best_us=1_000) == pytest.approx(700)

    def test_interruptions_are_counted_where_another_program_has_the_core(self) -> None:
        """Both on one core, so that they take turns."""
        core = min(os.sched_getaffinity(0))
        code = f"import os, time\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
        before, all_cores = timing._interruptions(), os.sched_getaffinity(0)
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        try:
            assert other.stdout is not None
            other.stdout.readline()
            os.sched_setaffinity(0, {core})
            end = time.perf_counter() + 5
            while timing._interruptions() == before and time.perf_counter() < end:
                pass
            assert timing._interruptions() > before
        finally:
            os.sched_setaffinity(0, all_cores)
            other.kill()
            other.communicate()


class TestCases:
    def test_outputs_start_as_nan(self) -> None:
        case = make_case(ADD, 4, make_weights(ADD, 0, 0), LIMITS, 0)
        assert all(bool(o.isnan().all()) for o in case.outputs())
        assert [tuple(i.shape) for i in case.inputs] == [(4, 8), (4, 8)]

    def test_the_same_seed_gives_the_same_case(self) -> None:
        one, same, other = (make_case(ADD, 4, make_weights(ADD, 0, s), LIMITS, s) for s in (1, 1, 2))
        assert torch.equal(one.inputs[0], same.inputs[0])
        assert not torch.equal(one.inputs[0], other.inputs[0])

    def test_weights_rotate_over_more_than_the_caches(self) -> None:
        kind = TensorType("float32", (256, 256))
        linear = OpSignature("linear", (), (kind,), ())
        copies = make_weights(linear, 1 << 20, 0)
        assert len(copies) == 4
        assert len({w[0].data_ptr() for w in copies if w[0] is not None}) == 4

    @pytest.mark.parametrize("rows", [1, 4, 16])
    def test_attention_runs_on_a_step_the_engine_could_see(self, rows: int) -> None:
        head = TensorType("float32", ("T", 2, 8))
        attrs = {"scale": 0.3, "window": 0, "softcap": 0.0, "alibi": False}
        signature = OpSignature("paged_attention", (head, head, head), (), (head,), attrs)
        case = make_case(signature, rows, ((),), LIMITS, 0)
        step = case.step
        assert int(step.cu_q[-1]) == rows == int(step.counts[0])
        # Up to max_batch_size rows are decoding sequences with a full cache, more are one prompt.
        lengths = step.kv_lens.tolist()
        assert lengths == ([LIMITS.max_seq_len] * rows if rows <= LIMITS.max_batch_size else [rows])
        pages = step.page_table.flatten().tolist()
        assert len(set(pages)) == len(pages)
        assert max(pages) < step.kv_pool.shape[0]
        (out,) = reference_outputs(signature, case)
        assert bool(out.isfinite().all())
