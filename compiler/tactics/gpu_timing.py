"""Time a pack on a GPU of this machine and keep the outcomes in a timing cache.

Nothing here needs torch or Triton: it runs where only the runtime is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapeout.compiler.files import check_output
from tapeout.compiler.report import StepTiming
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import (
    Gpu,
    GpuTimings,
    StepOutcome,
    changed_ops,
    gpus_meant,
    plan_digest,
)
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.errors import UsageError
from tapeout.runtime.tactic_timer.pack import Entry, Pack
from tapeout.runtime.tactic_timer.pack_file import read_pack
from tapeout.runtime.tactic_timer.plan_search import timed_key
from tapeout.runtime.tactic_timer.session import PackTimes, time_pack


@dataclass(frozen=True)
class TimedPack:
    """What timing a pack gave.

    Attributes:
        gpu: where. entries, candidates: of the pack.
        timed: candidates with a time. lost: the others: entry, tactic, reason.
        unavailable: those of the lost that were not tried, for want of a library; no cache keeps them.
        skipped: entries and whole steps nothing is known of, with the reason.
        steps: whole steps that were timed, or that cannot run.
    """

    gpu: Gpu
    pack: Pack
    times: PackTimes
    timed: int
    lost: tuple[tuple[str, str, str], ...]
    unavailable: tuple[tuple[str, str, str], ...]
    skipped: Mapping[str, str]
    steps: tuple[StepTiming, ...]

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


def time_into_cache(
    pack_path: Path,
    cache_path: Path | None,
    *,
    earlier_path: Path | None = None,
    device: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> TimedPack:
    """Time a pack; add what was found to the cache file, which is made when there is none.

    Args:
        earlier_path: a timing cache whose timings the written one gets where it has none of its own.

    Raises:
        UsageError: the pack or a cache cannot be read, the cache cannot be written, the earlier timings
            are of another GPU that the pack's target could mean; told before anything is timed.
        EngineCorruptError: the pack is damaged. EngineIncompatibleError: the GPU cannot run it.
    """
    if cache_path is not None:
        if cache_path.exists() and cache_path.samefile(pack_path):
            raise UsageError(
                f"{cache_path} is the pack, which would be lost", hint="name another file with -o"
            )
        check_output(cache_path, "timing cache")
    cache = TimingCache.load(cache_path)
    pack = read_pack(pack_path).pack
    earlier = TimingCache.load(earlier_path)
    cache.add_missing(earlier)
    times = time_pack(
        pack_path,
        pack,
        device=device,
        progress=progress,
        check_gpu=lambda facts: _check_same(Gpu.of(facts), earlier, pack),
    )
    done = record(pack, times, cache)
    cache.save()
    return done


def _check_same(gpu: Gpu, earlier: TimingCache, pack: Pack) -> None:
    """Raise UsageError where no engine of the pack's target could be built from both: times of two GPUs."""
    others = [other.text() for other in gpus_meant(earlier, pack.target, pack.sm) if other != gpu]
    if others:
        raise UsageError(
            f"{earlier.path} holds timings of {', '.join(others)}, this GPU is {gpu.text()}: {pack.target} "
            "could mean both, and an engine takes times of one",
            hint="time on the same model, or remove that file and pack again, so that all is timed anew",
        )


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
    steps = tuple(_record_step(pack, index, times, timings) for index in sorted(times.steps))
    return TimedPack(gpu, pack, times, timed, tuple(lost), tuple(unavailable), skipped, steps)


def _record_step(pack: Pack, index: int, times: PackTimes, timings: GpuTimings) -> StepTiming:
    """Put a whole step into the cache, under the candidates that it was found among."""
    step, result = pack.steps[index], times.steps[index]
    entries = {pack.entries[number].signature: number for number in step.ops}
    keys: dict[str, dict[str, float]] = {signature: {} for signature in entries}
    for signature, number in entries.items():
        for place, candidate in enumerate(pack.entries[number].candidates):
            known = times.results.get((number, place))
            if known is not None and known.time_us is not None:
                keys[signature][timed_key(candidate.kernel_hash, known.algorithm)] = known.time_us
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


def _told(lost: tuple[tuple[str, str, str], ...]) -> list[dict[str, str]]:
    return [{"entry": e, "tactic": t, "reason": r} for e, t, r in lost]
