"""Choosing tactics for a GPU from what was timed: winners, defaults, reasons, batch invariance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from fake_kernels import FakeTactic, compile_nothing

from tapeout.compiler import cuda_plan
from tapeout.compiler.cuda_plan import CudaChoices, choose_cuda, unfit_kernels
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings
from tapeout.compiler.tactics.gpu_contests import Contest, contests
from tapeout.compiler.tactics.gpu_select import TimedChoices, choose_timed, unanswered
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import CudaTarget
from tapeout.plugins.errors import TapeoutError, UnsupportedError
from tapeout.runtime.engine.manifest import Limits

LIMITS = Limits(max_batch_size=2, max_num_tokens=4, max_seq_len=64, tokens_per_page=16)
TARGET = CudaTarget(90, 132, 232448)
GPU = Gpu("NVIDIA H200", 90, 132, 141)
ADD = OpSignature("add", (TensorType("float32", ("T", 16)),) * 2, (), (TensorType("float32", ("T", 16)),))
KEY = ADD.key()
ROWS = [1, 2, 4]
Known = Mapping[tuple[str, str], Mapping[int, float | str]]


@dataclass
class Game:
    """The contests of some tactics for ADD, and what is known of them."""

    decisions: tuple[Contest, ...]
    timings: GpuTimings
    defaults: CudaChoices

    def know(self, known: Known) -> Game:
        """Note outcomes: {(kind, tactic): {rows: microseconds or reason}}."""
        for contest in self.decisions:
            for c in contest.contenders:
                told = known.get((contest.kind, c.name), {}).get(contest.rows)
                if told is not None:
                    outcome = Outcome(None, told) if isinstance(told, str) else Outcome(told)
                    place = (contest.key, contest.kind, contest.conditions, contest.rows)
                    self.timings.put(*place, c.kernel_hash, c.name, outcome)
        return self

    def choose(self, *, batch_invariant: bool = False) -> TimedChoices:
        defaults = (
            choose_cuda({KEY: ADD}, LIMITS, TARGET, batch_invariant=True)
            if batch_invariant
            else self.defaults
        )
        return choose_timed(self.decisions, self.timings, defaults, batch_invariant=batch_invariant)


@pytest.fixture
def game(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Game]:
    def make(*tactics: FakeTactic) -> Game:
        monkeypatch.setattr(cuda_plan, "cuda_tactics", lambda op: tactics)
        return Game(
            contests({KEY: ADD}, LIMITS, TARGET),
            GpuTimings(TimingCache(None), GPU),
            choose_cuda({KEY: ADD}, LIMITS, TARGET, batch_invariant=False),
        )

    return make


def ranges(choices: CudaChoices, kind: str = "mixed") -> list[tuple[int, str]]:
    return [(c.rows, c.tactic.name) for c in getattr(choices, kind).get(KEY, ())]


def by_rows(*times: float | str) -> dict[int, float | str]:
    return dict(zip(ROWS, times, strict=False))


def test_contests_stand_for_every_bucket_and_kind(game: Callable[..., Game]) -> None:
    plain, decode = FakeTactic("plain", 3), FakeTactic("decode", 1, decode_only=True)
    odd, few = FakeTactic("odd", refusal="needs SM 100"), FakeTactic("few", 2, max_rows=2)
    decisions = game(plain, decode, odd, few).decisions
    assert [(c.kind, c.rows, [x.name for x in c.contenders]) for c in decisions] == [
        ("mixed", 1, ["few", "plain"]),  # the most promising first
        ("mixed", 2, ["few", "plain"]),
        ("mixed", 4, ["plain"]),
        ("decode", 1, ["decode", "few", "plain"]),
        ("decode", 2, ["decode", "few", "plain"]),
    ]
    assert all(c.rejected == {"odd": "needs SM 100"} for c in decisions)


def test_the_fastest_wins_at_every_bucket(game: Callable[..., Game]) -> None:
    known: Known = {("mixed", "a"): by_rows(1, 5, 5), ("mixed", "b"): by_rows(2, 2, 2)}
    timed = game(FakeTactic("a"), FakeTactic("b"), FakeTactic("c", refusal="no")).know(known).choose()
    assert ranges(timed.choices) == [(1, "a"), (4, "b")]
    assert (timed.timed, timed.known, timed.candidates) == (True, 6, 6)
    assert (timed.defaults, timed.contests) == (0, 3)
    second = timed.timings[1]
    assert (second.rows, second.tactic, second.time_us, second.losers) == (2, "b", 2, {"a": 5})
    assert second.rejected == {"c": "no"}
    assert second.cached


def test_steps_that_decode_have_winners_of_their_own(game: Callable[..., Game]) -> None:
    known: Known = {
        ("mixed", "plain"): by_rows(3, 3, 3),
        ("decode", "plain"): by_rows(2, 2),
        ("decode", "decode"): by_rows(9, 1),
    }
    timed = game(FakeTactic("plain"), FakeTactic("decode", decode_only=True)).know(known).choose()
    assert ranges(timed.choices) == [(4, "plain")]
    assert ranges(timed.choices, "decode") == [(1, "plain"), (2, "decode")]
    assert [(t.kind, t.rows) for t in timed.timings[3:]] == [("decode", 1), ("decode", 2)]


def test_what_nobody_timed_gets_the_default(game: Callable[..., Game]) -> None:
    """Where one candidate is known the known decide; where none is, the default stands."""
    known: Known = {("mixed", "slow"): by_rows(7)}
    played = game(FakeTactic("slow", 5), FakeTactic("likely", 1)).know(known)
    timed = played.choose()
    assert ranges(timed.choices) == [(1, "slow"), (4, "likely")]
    assert (timed.timed, timed.known, timed.candidates, timed.defaults) == (False, 1, 6, 2)
    assert [t.time_us for t in timed.timings] == [7, None, None]
    assert [c.rows for c in unanswered(played.decisions, played.timings).contests] == ROWS
    untimed = choose_timed(played.decisions, None, played.defaults, batch_invariant=False)
    assert ranges(untimed.choices) == [(4, "likely")]
    assert (untimed.known, untimed.defaults) == (0, 3)


def test_what_failed_is_never_chosen(game: Callable[..., Game]) -> None:
    known: Known = {
        ("mixed", "likely"): by_rows("SIGSEGV while checking likely", "differs", "differs"),
        ("mixed", "slow"): by_rows(7, 7),
    }
    timed = game(FakeTactic("slow", 5), FakeTactic("likely", 1)).know(known).choose()
    # At 4 rows nothing is known of `slow`, which is better than a tactic that is wrong.
    assert ranges(timed.choices) == [(4, "slow")]
    assert timed.timings[0].rejected == {"likely": "SIGSEGV while checking likely"}
    assert timed.defaults == 1


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_nobody_checked_is_chosen_last(game: Callable[..., Game], batch_invariant: bool) -> None:
    known: Known = {("mixed", "likely"): by_rows("differs", "differs", "differs")}
    tactics = (FakeTactic("gluon", 1, interpretable=False), FakeTactic("plain", 9), FakeTactic("likely", 2))
    timed = game(*tactics).know(known).choose(batch_invariant=batch_invariant)
    assert ranges(timed.choices) == [(4, "plain")]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_when_all_failed_every_reason_is_told(game: Callable[..., Game], batch_invariant: bool) -> None:
    known: Known = {("mixed", "a"): by_rows("NaN", "NaN", "NaN"), ("mixed", "b"): by_rows(1, "hangs", 1)}
    with pytest.raises(TapeoutError) as caught:
        game(FakeTactic("a"), FakeTactic("b")).know(known).choose(batch_invariant=batch_invariant)
    assert f"no tactic computes {KEY} on the GPU that was timed" in caught.value.message
    assert "  2 rows, mixed, a: NaN" in caught.value.message
    assert "  2 rows, mixed, b: hangs" in caught.value.message


def test_one_kernel_under_two_names_is_timed_once(game: Callable[..., Game]) -> None:
    played = game(FakeTactic("a", NAME="same"), FakeTactic("b", NAME="same"))
    timed = played.know({("mixed", "a"): by_rows(1, 1, 1)}).choose()
    assert (timed.timed, timed.known) == (True, 6)


class TestBatchInvariant:
    KNOWN: Known = {  # noqa: RUF012
        ("mixed", "fast"): by_rows(1, 1, 1),
        ("mixed", "small"): by_rows(1, 1, 90),
        ("mixed", "even"): by_rows(5, 5, 5),
        ("decode", "decode"): by_rows(1, 1),
    }

    def test_one_tactic_for_all_rows(self, game: Callable[..., Game]) -> None:
        tactics = (FakeTactic("fast", batch_invariant=False), FakeTactic("small"), FakeTactic("even"))
        timed = game(*tactics).know(self.KNOWN).choose(batch_invariant=True)
        assert ranges(timed.choices) == [(4, "even")]
        assert timed.timed
        assert timed.timings[0].rejected == {"fast": "its result for a row depends on the other rows"}
        assert timed.timings[0].losers == {"small": 1}

    def test_steps_that_decode_run_the_same(self, game: Callable[..., Game]) -> None:
        timed = game(FakeTactic("even"), FakeTactic("decode", decode_only=True)).know(self.KNOWN)
        assert timed.choose(batch_invariant=True).choices.decode == {}

    def test_it_must_be_right_everywhere(self, game: Callable[..., Game]) -> None:
        known: Known = {("mixed", "a"): by_rows(1, 1, "differs"), ("mixed", "b"): by_rows(9, 9, 9)}
        timed = game(FakeTactic("a"), FakeTactic("b")).know(known).choose(batch_invariant=True)
        assert ranges(timed.choices) == [(4, "b")]

    def test_the_default_stands_where_no_tactic_is_known_everywhere(self, game: Callable[..., Game]) -> None:
        known: Known = {("mixed", "a"): by_rows(1, 1), ("mixed", "likely"): by_rows(2)}
        timed = game(FakeTactic("a", 5), FakeTactic("likely", 1)).know(known).choose(batch_invariant=True)
        assert ranges(timed.choices) == [(4, "likely")]
        assert not timed.timed
        lost: Known = {("mixed", "likely"): by_rows("differs")}
        timed = game(FakeTactic("a", 5), FakeTactic("likely", 1)).know(lost).choose(batch_invariant=True)
        assert ranges(timed.choices) == [(4, "a")]


class TestSharedMemory:
    """Only compiling a kernel tells how much it takes."""

    LARGE, FITS = FakeTactic("large", 1, SHARED=232449), FakeTactic("fits", 2, SHARED=232448)

    @pytest.fixture(autouse=True)
    def compile_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_plan, "compile_all", compile_nothing)

    @pytest.mark.parametrize("batch_invariant", [False, True])
    def test_the_next_one_is_the_default(self, game: Callable[..., Game], batch_invariant: bool) -> None:
        first = game(self.LARGE, self.FITS, FakeTactic("last", 3)).defaults
        assert ranges(first) == [(4, "large")]
        unfit = unfit_kernels(first, TARGET)
        reason = "fill_integers takes 232449 bytes of shared memory a block, sm_90 has 232448"
        assert list(unfit.values()) == [reason]
        second = choose_cuda({KEY: ADD}, LIMITS, TARGET, batch_invariant=batch_invariant, unfit=unfit)
        assert ranges(second) == [(4, "fits")]
        assert unfit_kernels(second, TARGET) == {}
        found = contests({KEY: ADD}, LIMITS, TARGET, unfit)
        assert [[c.name for c in contest.contenders] for contest in found] == [["fits", "last"]] * 3
        assert all(contest.rejected == {"large": reason} for contest in found)

    def test_decode_tactics_too(self, game: Callable[..., Game]) -> None:
        large = FakeTactic("large", 1, SHARED=232449, decode_only=True)
        first = game(self.FITS, large).defaults
        assert ranges(first, "decode") == [(2, "large")]
        unfit = unfit_kernels(first, TARGET)
        second = choose_cuda({KEY: ADD}, LIMITS, TARGET, batch_invariant=False, unfit=unfit)
        assert ranges(second, "decode") == [(2, "fits")]

    @pytest.mark.parametrize("batch_invariant", [False, True])
    def test_none_is_left(self, game: Callable[..., Game], batch_invariant: bool) -> None:
        unfit = unfit_kernels(game(self.LARGE).defaults, TARGET)
        with pytest.raises(UnsupportedError, match=r"large: fill_integers takes 232449 bytes"):
            choose_cuda({KEY: ADD}, LIMITS, TARGET, batch_invariant=batch_invariant, unfit=unfit)
