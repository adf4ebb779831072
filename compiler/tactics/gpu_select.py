"""Choose tactics for a GPU from what was timed; what nobody timed gets a default.

Where a whole step was timed its winners run, also where they are not the fastest alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

from tapeout.compiler.cuda_plan import Chosen, CudaChoices, merge_ranges
from tapeout.compiler.report import ALONE, DEFAULT, IN_A_STEP, StepTiming, TacticTiming
from tapeout.compiler.tactics.gpu_cache import GpuTimings, StepOutcome, changed_ops, plan_digest
from tapeout.compiler.tactics.gpu_contests import Contender, Contest
from tapeout.compiler.tactics.gpu_regions import RegionContest, open_regions
from tapeout.compiler.tactics.gpu_steps import Place, StepContest, place_of
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.cuda import NATIVE
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.tactic_timer.pack import DECODE, MIXED
from tapeout.runtime.tactic_timer.plan_search import timed_key

_COMPANY = "its result for a row depends on the other rows"


@dataclass(frozen=True)
class TimedChoices:
    """Tactics, what was measured for the report, and how much of it was.

    Attributes:
        known, candidates: candidates with an outcome, and all. Of candidates that need a library only
            those count of which something is known: a machine without it is no reason to time again.
        defaults, contests: decisions without any time, and all.
        steps: what was timed as a whole, for the report.
    """

    choices: CudaChoices
    timings: tuple[TacticTiming, ...]
    known: int
    candidates: int
    defaults: int
    contests: int
    steps: tuple[StepTiming, ...] = ()

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
        """The fastest contender, of the preferred provider if it has one; there are times.

        Of equal ones the first by digest, as in a whole step.
        """
        times = self.times()
        its = {n for n in times if _named(self, n).provider == preferred}
        hashes = {c.name: c.kernel_hash for c in self.contest.contenders}
        return _named(self, min(its or times, key=lambda n: (times[n], hashes[n], n)))

    def timed_keys(self) -> dict[str, float]:
        """Times by what they belong to: see `plan_search.timed_key`."""
        hashes = {c.name: c.kernel_hash for c in self.contest.contenders}
        return {timed_key(hashes[n], self.outcomes[n].algorithm): t for n, t in self.times().items()}

    def reasons(self) -> dict[str, str]:
        return {n: str(o.reason) for n, o in self.outcomes.items() if o.time_us is None}


@dataclass(frozen=True)
class _Winner:
    """Who runs an op at a bucket. `rows`: of the range, in a step of `kind`; `how`: as the report says it."""

    judged: _Judged
    contender: Contender
    how: str
    kind: str
    rows: int

    @property
    def key(self) -> str:
        return self.judged.contest.key

    def chosen(self) -> Chosen:
        """Its launches, with the algorithm of the product that was timed."""
        chosen, outcome = self.contender.chosen, self.judged.outcomes.get(self.contender.name)
        if outcome is not None and outcome.algorithm is not None:
            chosen = chosen.with_algorithm(outcome.algorithm)
        return replace(chosen, rows=self.rows)


def choose_timed(
    decisions: Sequence[Contest],
    timings: GpuTimings | None,
    defaults: CudaChoices,
    *,
    batch_invariant: bool,
    preferred: str = "",
    steps: Sequence[StepContest] = (),
) -> TimedChoices:
    """The fastest correct tactic at every bucket.

    Args:
        defaults: what stands where nothing is known.
        batch_invariant: one tactic for all rows of an op, with the least time summed over its buckets.
        preferred: a provider whose tactics win wherever they have a time.
        steps: whole steps whose winners run, where they were timed; neither with `batch_invariant` nor
            with `preferred`, which ask for other tactics than the fastest.

    Raises:
        TapeoutError: every tactic of an op was tried and is wrong.
    """
    judged = _judge_all([_admitted(contest, batch_invariant) for contest in decisions], timings)
    if batch_invariant:
        judged = [j for j in judged if j.contest.kind == MIXED]
    answers = [] if batch_invariant or preferred else _answers(steps, judged, timings)
    winners: list[_Winner] = []
    for (key, kind), group in groupby(judged, key=lambda j: (j.contest.key, j.contest.kind)):
        members = list(group)
        standing = (defaults.decode if kind == DECODE else defaults.mixed)[key]
        winners += _one_for_all(members, standing) if batch_invariant else _each(members, standing, preferred)
    open_ = sum(w.how == DEFAULT for w in winners)
    winners = _in_steps(winners, answers)
    rows: dict[str, dict[str, list[Chosen]]] = {MIXED: {}, DECODE: {}}
    for winner in winners:
        rows[winner.kind].setdefault(winner.key, []).append(winner.chosen())
    mixed, decode = ({key: merge_ranges(row) for key, row in rows[kind].items()} for kind in (MIXED, DECODE))
    return TimedChoices(
        CudaChoices(mixed, decode),
        tuple(_report(winner) for winner in winners),
        known=sum(len(j.outcomes) for j in judged),
        candidates=sum(len(_counted(j)) for j in judged),
        defaults=open_,
        contests=len(judged),
        steps=tuple(_step_report(step, outcome, judged) for step, outcome in answers if outcome is not None),
    )


@dataclass(frozen=True)
class Unanswered:
    """What is to be timed: contests, and whole steps and regions all of whose contests are among them."""

    contests: tuple[Contest, ...]
    steps: tuple[StepContest, ...]
    regions: tuple[RegionContest, ...] = ()


def unanswered(
    decisions: Sequence[Contest],
    timings: GpuTimings | None,
    wanted: str = "",
    steps: Sequence[StepContest] = (),
    regions: Sequence[RegionContest] = (),
    segments: Mapping[str, str] = MappingProxyType({}),
) -> Unanswered:
    """Contests with a contender of which nothing is known, of our own kernels or the `wanted` provider; whole
    steps of which nothing is known or that hold such a contest, and so may get other finalists; regions of
    whose segment (SHA-256 in `segments`, by digest) nothing is known."""
    judged = _judge_all(decisions, timings)
    open_ = open_regions(regions, {place_of(j.contest): j.timed_keys() for j in judged}, timings, segments)
    asked = {place_of(contest) for region in open_ for contest in region.contests}
    asked |= {place_of(j.contest) for j in judged if len(j.outcomes) < len(_counted(j, wanted))}
    times = {place_of(j.contest): j.times() for j in judged}
    left = []
    for step, outcome in _answers(steps, judged, timings):
        places = {place_of(contest) for contest in step.contests}
        # An op of which every tactic has lost leaves nothing to time.
        if places & asked or (outcome is None and all(times[place] for place in places)):
            left.append(step)
    asked |= {place_of(contest) for step in left for contest in step.contests}
    # What is timed anew may have another winner, and a region stands for the winners of its ops.
    again = [
        r for r in regions if any(place_of(c) in asked for c in r.contests) and r.body.digest in segments
    ]
    asked |= {place_of(contest) for region in again for contest in region.contests}
    return Unanswered(tuple(c for c in decisions if place_of(c) in asked), tuple(left), tuple(again))


def times_alone(decisions: Sequence[Contest], timings: GpuTimings | None) -> dict[Place, Mapping[str, float]]:
    """What is known of every contest's contenders by themselves."""
    return {place_of(j.contest): j.timed_keys() for j in _judge_all(decisions, timings)}


def _answers(
    steps: Sequence[StepContest], judged: Sequence[_Judged], timings: GpuTimings | None
) -> list[tuple[StepContest, StepOutcome | None]]:
    """What is known of every step, among the finalists that there are now."""
    by_place = {place_of(j.contest): j for j in judged}
    found: list[tuple[StepContest, StepOutcome | None]] = []
    for step in steps:
        times = {key: by_place[place_of(c)].timed_keys() for key, c in step.distinct().items()}
        outcome = None
        if timings is not None and all(times.values()):
            plans = plan_digest(times, step.fixed)
            outcome = timings.get_step(step.order, step.kind, step.conditions, step.rows, plans)
        if outcome is not None and outcome.time_us is not None:
            hashes = {
                k: {c.kernel_hash for c in contest.contenders} for k, contest in step.distinct().items()
            }
            if not all(outcome.winners.get(key) in known for key, known in hashes.items()):
                outcome = None
        found.append((step, outcome))
    return found


def _in_steps(
    winners: Sequence[_Winner], answers: Sequence[tuple[StepContest, StepOutcome | None]]
) -> list[_Winner]:
    """The winners, with those of whole steps in their places.

    An op that has no contests for decoding runs in such steps as in any, unless one of them was won by
    another tactic: then it gets ranges of its own there.
    """
    found = {(w.key, w.kind, w.judged.contest.rows): w for w in winners}
    special: dict[str, list[_Winner]] = {}
    for kind in (MIXED, DECODE):  # decode steps fall back on what mixed ones have won
        for step, outcome in answers:
            if step.kind != kind:
                continue
            for key, contest in step.distinct().items():
                place = place_of(contest)
                winner = found[place]
                if outcome is not None and outcome.time_us is not None and key not in step.fixed:
                    winner = _won(winner, outcome.winners[key])
                if contest.kind == kind:
                    found[place] = winner
                else:
                    special.setdefault(key, []).append(replace(winner, kind=kind, rows=step.rows))
    for key, row in special.items():
        if any(
            w.contender.kernel_hash != found[place_of(w.judged.contest)].contender.kernel_hash for w in row
        ):
            found |= {(key, DECODE, w.rows): w for w in row}
    return list(found.values())


def _won(winner: _Winner, kernel_hash: str) -> _Winner:
    """The winner that a whole step has in its place."""
    if winner.contender.kernel_hash == kernel_hash:
        return replace(winner, how=IN_A_STEP)
    contenders = winner.judged.contest.contenders
    return replace(
        winner, contender=next(c for c in contenders if c.kernel_hash == kernel_hash), how=IN_A_STEP
    )


def _counted(judged: _Judged, wanted: str = "") -> list[Contender]:
    """Contenders that need no library or the `wanted` one, and those of which something is known."""
    contenders = judged.contest.contenders
    return [c for c in contenders if c.provider in {NATIVE, wanted} or c.name in judged.outcomes]


def _judge_all(decisions: Sequence[Contest], timings: GpuTimings | None) -> list[_Judged]:
    return _one_library([_judge(contest, timings) for contest in decisions])


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


def _each(members: Sequence[_Judged], standing: Sequence[Chosen], preferred: str) -> list[_Winner]:
    """The winner at every bucket by itself."""
    found = []
    for member in members:
        if member.times():
            found.append(_winner(member, member.best(preferred), ALONE))
            continue
        left = [
            c for c in member.contest.contenders if c.name not in member.outcomes and c.provider == NATIVE
        ]
        if not left:
            raise _none_works(member.contest.key, [member])
        default = next(c.tactic.name for c in standing if member.contest.rows <= c.rows)
        # What only a GPU can check comes last.
        left.sort(key=lambda c: (c.name != default, not c.chosen.tactic.interpretable))
        found.append(_winner(member, left[0], DEFAULT))
    return found


def _one_for_all(members: Sequence[_Judged], standing: Sequence[Chosen]) -> list[_Winner]:
    """One tactic at all buckets: that with the least time in sum, or the default one."""
    times = [member.times() for member in members]
    everywhere = set.intersection(*(set(t) for t in times))
    if everywhere:
        name = min(everywhere, key=lambda n: (sum(t[n] for t in times), n))
        return [_winner(member, _named(member, name), ALONE) for member in members]
    failed = {n for member in members for n in member.reasons()}
    left = set.intersection(*({c.name for c in m.contest.contenders} for m in members)) - failed
    if not left:
        raise _none_works(members[0].contest.key, members)
    default = standing[-1].tactic.name
    unchecked = {c.name for c in members[0].contest.contenders if not c.chosen.tactic.interpretable}
    name = min(left, key=lambda n: (n != default, n in unchecked, n))
    return [_winner(member, _named(member, name), DEFAULT) for member in members]


def _winner(member: _Judged, contender: Contender, how: str) -> _Winner:
    return _Winner(member, contender, how, member.contest.kind, member.contest.rows)


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


def _report(winner: _Winner) -> TacticTiming:
    times, contest, name = winner.judged.times(), winner.judged.contest, winner.contender.name
    return TacticTiming(
        signature=contest.key,
        rows=winner.rows,
        tactic=name,
        time_us=times.get(name),
        losers={n: t for n, t in times.items() if n != name},
        rejected={**contest.rejected, **winner.judged.reasons()},
        cached=name in times,
        kind=winner.kind,
        chosen=winner.how,
    )


def _step_report(step: StepContest, outcome: StepOutcome, judged: Sequence[_Judged]) -> StepTiming:
    if outcome.time_us is None:
        return StepTiming(step.kind, step.rows, None, reason=outcome.reason)
    by_place = {place_of(j.contest): j for j in judged}
    times = {key: by_place[place_of(c)].timed_keys() for key, c in step.distinct().items()}
    changed = changed_ops(step.order, times, outcome.winners)
    return StepTiming(step.kind, step.rows, outcome.time_us, outcome.alone_us, changed, len(step.order))
