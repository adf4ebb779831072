"""Choose tactics for a GPU from what was timed; what nobody timed gets a default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tapeout.compiler.cuda_plan import Chosen, CudaChoices, merge_ranges
from tapeout.compiler.report import TacticTiming
from tapeout.compiler.tactics.gpu_cache import GpuTimings
from tapeout.compiler.tactics.gpu_contests import Contender, Contest
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.cuda import NATIVE
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.tactic_timer.pack import DECODE, MIXED

_COMPANY = "its result for a row depends on the other rows"


@dataclass(frozen=True)
class TimedChoices:
    """Tactics, what was measured for the report, and how much of it was.

    Attributes:
        known, candidates: candidates with an outcome, and all. Of candidates that need a library only
            those count of which something is known: a machine without it is no reason to time again.
        defaults, contests: decisions without any time, and all.
    """

    choices: CudaChoices
    timings: tuple[TacticTiming, ...]
    known: int
    candidates: int
    defaults: int
    contests: int

    @property
    def timed(self) -> bool:
        return self.known == self.candidates


@dataclass(frozen=True)
class _Judged:
    """A contest with the outcomes that are known, by the contender's name."""

    contest: Contest
    outcomes: Mapping[str, Outcome]

    def times(self) -> dict[str, float]:
        return {n: o.time_us for n, o in self.outcomes.items() if o.time_us is not None}

    def best(self, preferred: str) -> Contender:
        """The fastest contender, of the preferred provider if it has one; there are times."""
        times = self.times()
        its = {n for n in times if _named(self, n).provider == preferred}
        return _named(self, min(its or times, key=lambda n: (times[n], n)))

    def reasons(self) -> dict[str, str]:
        return {n: str(o.reason) for n, o in self.outcomes.items() if o.time_us is None}


def choose_timed(
    decisions: Sequence[Contest],
    timings: GpuTimings | None,
    defaults: CudaChoices,
    *,
    batch_invariant: bool,
    preferred: str = "",
) -> TimedChoices:
    """The fastest correct tactic at every bucket.

    Args:
        defaults: what stands where nothing is known.
        batch_invariant: one tactic for all rows of an op, with the least time summed over its buckets.
        preferred: a provider whose tactics win wherever they have a time.

    Raises:
        TapeoutError: every tactic of an op was tried and is wrong.
    """
    judged = _one_library([_judge(_admitted(contest, batch_invariant), timings) for contest in decisions])
    if batch_invariant:
        judged = [j for j in judged if j.contest.kind == MIXED]
    winners: list[tuple[_Judged, Contender, bool]] = []
    for (key, kind), group in groupby(judged, key=lambda j: (j.contest.key, j.contest.kind)):
        members = list(group)
        standing = (defaults.decode if kind == DECODE else defaults.mixed)[key]
        winners += _one_for_all(members, standing) if batch_invariant else _each(members, standing, preferred)
    rows: dict[str, dict[str, list[Chosen]]] = {MIXED: {}, DECODE: {}}
    for member, winner, _ in winners:
        outcome = member.outcomes.get(winner.name)
        chosen = winner.chosen
        if outcome is not None and outcome.algorithm is not None:
            chosen = chosen.with_algorithm(outcome.algorithm)
        rows[member.contest.kind].setdefault(member.contest.key, []).append(chosen)
    mixed, decode = ({key: merge_ranges(row) for key, row in rows[kind].items()} for kind in (MIXED, DECODE))
    return TimedChoices(
        CudaChoices(mixed, decode),
        tuple(_report(member, winner) for member, winner, _ in winners),
        known=sum(len(j.outcomes) for j in judged),
        candidates=sum(len(_counted(j)) for j in judged),
        defaults=sum(not timed for _, _, timed in winners),
        contests=len(judged),
    )


def unanswered(
    decisions: Sequence[Contest], timings: GpuTimings | None, wanted: str = ""
) -> tuple[Contest, ...]:
    """Contests with a contender of which nothing is known, of our own kernels or the `wanted` provider."""
    judged = (_judge(contest, timings) for contest in decisions)
    return tuple(j.contest for j in judged if len(j.outcomes) < len(_counted(j, wanted)))


def _counted(judged: _Judged, wanted: str = "") -> list[Contender]:
    """Contenders that need no library or the `wanted` one, and those of which something is known."""
    contenders = judged.contest.contenders
    return [c for c in contenders if c.provider in {NATIVE, wanted} or c.name in judged.outcomes]


def _one_library(judged: Sequence[_Judged]) -> list[_Judged]:
    """Without the algorithms of older major versions of a library: an engine loads one."""

    def major(outcome: Outcome) -> int:
        return outcome.algorithm.version // 10000 if outcome.algorithm else 0

    newest = max((major(o) for j in judged for o in j.outcomes.values()), default=0)
    return [
        replace(j, outcomes={n: o for n, o in j.outcomes.items() if major(o) in {0, newest}}) for j in judged
    ]


def _admitted(contest: Contest, batch_invariant: bool) -> Contest:
    """The contest without those that batch invariance forbids."""
    if not batch_invariant:
        return contest
    allowed = tuple(c for c in contest.contenders if c.chosen.tactic.batch_invariant)
    barred = {c.name: _COMPANY for c in contest.contenders if not c.chosen.tactic.batch_invariant}
    return Contest(
        contest.key, contest.signature, contest.kind, contest.rows, contest.conditions, allowed,
        {**contest.rejected, **barred},
    )  # fmt: skip


def _judge(contest: Contest, timings: GpuTimings | None) -> _Judged:
    outcomes: dict[str, Outcome] = {}
    if timings is not None:
        for c in contest.contenders:
            outcome = timings.get(contest.key, contest.kind, contest.conditions, contest.rows, c.kernel_hash)
            timed_alone = outcome is not None and outcome.time_us is not None and outcome.algorithm is None
            if c.provider != NATIVE and timed_alone:
                continue  # a time of no known algorithm
            if outcome is not None:
                outcomes[c.name] = outcome
    return _Judged(contest, outcomes)


def _each(
    members: Sequence[_Judged], standing: Sequence[Chosen], preferred: str
) -> list[tuple[_Judged, Contender, bool]]:
    """The winner at every bucket by itself, and whether a time decided."""
    found = []
    for member in members:
        if member.times():
            found.append((member, member.best(preferred), True))
            continue
        left = [
            c for c in member.contest.contenders if c.name not in member.outcomes and c.provider == NATIVE
        ]
        if not left:
            raise _none_works(member.contest.key, [member])
        default = next(c.tactic.name for c in standing if member.contest.rows <= c.rows)
        # What only a GPU can check comes last.
        left.sort(key=lambda c: (c.name != default, not c.chosen.tactic.interpretable))
        found.append((member, left[0], False))
    return found


def _one_for_all(
    members: Sequence[_Judged], standing: Sequence[Chosen]
) -> list[tuple[_Judged, Contender, bool]]:
    """One tactic at all buckets: that with the least time in sum, or the default one."""
    times = [member.times() for member in members]
    everywhere = set.intersection(*(set(t) for t in times))
    if everywhere:
        name = min(everywhere, key=lambda n: (sum(t[n] for t in times), n))
        return [(member, _named(member, name), True) for member in members]
    failed = {n for member in members for n in member.reasons()}
    left = set.intersection(*({c.name for c in m.contest.contenders} for m in members)) - failed
    if not left:
        raise _none_works(members[0].contest.key, members)
    default = standing[-1].tactic.name
    unchecked = {c.name for c in members[0].contest.contenders if not c.chosen.tactic.interpretable}
    name = min(left, key=lambda n: (n != default, n in unchecked, n))
    return [(member, _named(member, name), False) for member in members]


def _named(member: _Judged, name: str) -> Contender:
    return next(c for c in member.contest.contenders if c.name == name)


def _none_works(key: str, members: Sequence[_Judged]) -> TapeoutError:
    reasons = [
        f"  {m.contest.rows} rows, {m.contest.kind}, {name}: {reason}"
        for m in members
        for name, reason in m.reasons().items()
    ]
    return TapeoutError(
        f"no tactic computes {key} on the GPU that was timed:\n" + "\n".join(reasons),
        hint="without --timing-cache the engine is built from defaults",
    )


def _report(member: _Judged, winner: Contender) -> TacticTiming:
    times, contest = member.times(), member.contest
    return TacticTiming(
        signature=contest.key,
        rows=contest.rows,
        tactic=winner.name,
        time_us=times.get(winner.name),
        losers={n: t for n, t in times.items() if n != winner.name},
        rejected={**contest.rejected, **member.reasons()},
        cached=winner.name in times,
        kind=contest.kind,
    )
