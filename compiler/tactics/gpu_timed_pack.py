"""What timing a pack gave: put into a timing cache, and told.

Nothing here needs torch or Triton: it runs where only the runtime is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tapeout.compiler.report import StepTiming
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import (
    DIGEST_LENGTH,
    Gpu,
    GpuTimings,
    RegionOutcome,
    StepOutcome,
    changed_ops,
    plan_digest,
    wins,
)
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.cuda import NATIVE, TENSORRT
from tapeout.runtime.engine.manifest import RegionTime
from tapeout.runtime.tactic_timer.pack import Entry, Pack
from tapeout.runtime.tactic_timer.plan_search import timed_key
from tapeout.runtime.tactic_timer.results import PackTimes


@dataclass(frozen=True)
class TimedPack:
    """What timing a pack gave.

    Attributes:
        gpu: where. times: what was measured, by the numbers of the pack's entries.
        timed: how many candidates have a time. lost: the others: entry, tactic, reason.
        unavailable: those of the lost that were not tried, for want of a library; no cache keeps them.
        skipped: entries and whole steps nothing is known of, with the reason.
        steps: whole steps that were timed, or that cannot run.
        regions: those that were timed, or whose segment may not be used.
    """

    gpu: Gpu
    pack: Pack
    times: PackTimes
    timed: int
    lost: tuple[tuple[str, str, str], ...]
    unavailable: tuple[tuple[str, str, str], ...]
    skipped: Mapping[str, str]
    steps: tuple[StepTiming, ...]
    regions: tuple[RegionTime, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the winner and all times of every entry."""
        return {
            "gpu": vars(self.gpu),
            "target": self.pack.target,
            "candidates": self.pack.num_candidates,
            "timed": self.timed,
            "lost": _told(self.lost),
            "unavailable": _told(self.unavailable),
            "skipped": dict(self.skipped),
            "restarts": self.times.restarts,
            "seconds": round(self.times.seconds, 3),
            "steps": [asdict(step) for step in self.steps],
            "regions": [asdict(region) for region in self.regions],
            "entries": [self._entry(i, entry) for i, entry in enumerate(self.pack.entries)],
        }

    def _entry(self, index: int, entry: Entry) -> dict[str, Any]:
        results = {
            c.tactic: self.times.results[index, j]
            for j, c in enumerate(entry.candidates)
            if (index, j) in self.times.results
        }
        times = {n: r.time_us for n, r in results.items() if r.time_us is not None}
        return {
            "signature": entry.signature,
            "kind": entry.kind,
            "rows": entry.rows,
            "tactic": min(times, key=lambda n: (times[n], n)) if times else None,
            "times_us": dict(sorted(times.items(), key=lambda item: item[1])),
            "rejected": {n: r.reason for n, r in results.items() if r.time_us is None},
        }


def record(pack: Pack, times: PackTimes, cache: TimingCache) -> TimedPack:
    """Put what was measured into a cache (not yet its file)."""
    gpu = Gpu.of(times.gpu)
    timings = GpuTimings(cache, gpu)
    lost, unavailable, timed = [], [], 0
    for (index, candidate), result in times.results.items():
        entry = pack.entries[index]
        tactic = entry.candidates[candidate]
        outcome = Outcome(result.time_us, result.reason, result.algorithm)
        told = entry.title(), tactic.tactic, str(result.reason)
        if result.unavailable:  # where the library is it may be fast
            unavailable.append(told)
        else:
            timings.put(
                entry.signature,
                entry.kind,
                entry.conditions,
                entry.rows,
                tactic.kernel_hash,
                tactic.tactic,
                outcome,
            )
        if result.time_us is None:
            lost.append(told)
        else:
            timed += 1
    skipped = {pack.entries[index].title(): why for index, why in times.skipped.items()}
    skipped |= {pack.steps[index].title(): why for index, why in times.skipped_steps.items()}
    skipped |= {pack.region_title(index): why for index, why in times.skipped_regions.items()}
    steps = tuple(_record_step(pack, index, times, timings) for index in sorted(times.steps))
    regions = tuple(_record_region(pack, index, times, timings) for index in sorted(times.regions))
    return TimedPack(gpu, pack, times, timed, tuple(lost), tuple(unavailable), skipped, steps, regions)


def _record_step(pack: Pack, index: int, times: PackTimes, timings: GpuTimings) -> StepTiming:
    """Put a whole step into the cache, under the candidates that it was found among."""
    step, result = pack.steps[index], times.steps[index]
    entries = {pack.entries[number].signature: number for number in step.ops}
    keys = _times_alone(pack, step.ops, times)
    winners = {
        s: pack.entries[n].candidates[c].kernel_hash
        for s, n in entries.items()
        if (c := result.winners.get(n)) is not None
    }
    order = [pack.entries[number].signature for number in step.ops]
    timings.put_step(
        order,
        step.kind,
        step.conditions,
        step.rows,
        plan_digest(keys, frozenset(pack.entries[number].signature for number in step.fixed)),
        StepOutcome(result.time_us, result.alone_us, winners, result.reason),
    )
    if result.time_us is None:
        return StepTiming(step.kind, step.rows, None, reason=result.reason)
    changed = changed_ops(order, keys, winners)
    return StepTiming(step.kind, step.rows, result.time_us, result.alone_us, changed, len(order))


def _record_region(pack: Pack, index: int, times: PackTimes, timings: GpuTimings) -> RegionTime:
    """Put a region into the cache, under its segment and the kernels of ours that it was timed against."""
    case, result = pack.region_cases[index], times.regions[index]
    body = pack.regions[case.region]
    packed = pack.segments[body.segment]
    keys = _times_alone(pack, case.ops, times)
    by_rows = any(value.shape[0] == "T" for value in body.values)
    timings.put_region(
        body.digest,
        case.kind,
        case.conditions,
        case.rows if by_rows else case.logit_rows,
        RegionOutcome(
            plan_digest(keys, frozenset(keys)),
            packed.sha256,
            packed.segment.package,
            packed.segment.version,
            packed.gpu,
            result.time_us,
            result.own_us,
            result.reason,
            result.unavailable,
        ),
    )
    return RegionTime(
        digest=body.digest[:DIGEST_LENGTH],
        regions=0,
        ops=tuple(record.op for record in body.records),
        kind=case.kind,
        rows=case.rows,
        logit_rows=case.logit_rows,
        winner=TENSORRT if wins(result.time_us, result.own_us) else NATIVE,
        segment_us=result.time_us,
        own_us=result.own_us,
        reason=result.reason or "",
    )


def _times_alone(pack: Pack, ops: Sequence[int], times: PackTimes) -> dict[str, dict[str, float]]:
    """Times alone of the candidates of some entries, by signature and what they belong to."""
    keys: dict[str, dict[str, float]] = {}
    for number in ops:
        entry = pack.entries[number]
        its = keys.setdefault(entry.signature, {})
        for place, candidate in enumerate(entry.candidates):
            known = times.results.get((number, place))
            if known is not None and known.time_us is not None:
                its[timed_key(candidate.kernel_hash, known.algorithm)] = known.time_us
    return keys


def _told(lost: tuple[tuple[str, str, str], ...]) -> list[dict[str, str]]:
    return [{"entry": e, "tactic": t, "reason": r} for e, t, r in lost]
