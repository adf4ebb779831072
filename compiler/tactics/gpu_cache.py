"""Timings of GPUs in the timing cache.

An entry stands for a signature, a kind of step, the limits that shape it and a GPU; in it, by rows,
outcomes by the digest of a tactic's kernels and launches. A changed kernel has another digest, so
what was measured of the old one simply does not answer. A tactic whose product a library computes
stands there with the algorithm that was fastest and the version of the library.

Of regions an entry stands for the region's digest in the place of a signature; in it, by rows, what a segment
and our kernels took, by the digest of both.

Of whole steps an entry stands for the order of the ops in place of a signature; in it, by rows, times
and winners by the digest of the candidates that were compared. A cache that has none is as good as it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.compiler.targets import SKUS
from tapeout.plugins.cuda import MatmulAlgorithm
from tapeout.plugins.errors import UsageError
from tapeout.runtime.engine.target import GpuFacts, is_model
from tapeout.runtime.tactic_timer.plan_search import finalists, kernel_hash_of


@dataclass(frozen=True, order=True)
class Gpu:
    """What times depend on: the model's name, compute capability, multiprocessors, memory."""

    name: str
    sm: int
    sm_count: int
    memory_gib: int

    @classmethod
    def of(cls, facts: GpuFacts) -> Gpu:
        return cls(facts.name, facts.sm, facts.sm_count, round(facts.total_bytes / 2**30))

    def text(self) -> str:
        return f"{self.name} (sm_{self.sm}, {self.sm_count} multiprocessors, {self.memory_gib} GiB)"


@dataclass(frozen=True)
class StepOutcome:
    """Microseconds of a whole step by its fastest plan and by that of the fastest alone, or why it cannot
    run.

    winners: digest of the kernels of each op's tactic in the fastest plan, by signature.
    """

    time_us: float | None
    alone_us: float | None = None
    winners: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None


#: Digits of a region's digest that reports show.
DIGEST_LENGTH = 16


def wins(segment_us: float | None, own_us: float | None) -> bool:
    """Was a segment measured faster than our kernels?"""
    return segment_us is not None and own_us is not None and segment_us < own_us


@dataclass(frozen=True)
class RegionOutcome:
    """Microseconds of a region at a bucket by its segment and by our fastest kernels, or why the segment may
    not be used.

    Attributes:
        own: digest of our kernels (`plan_digest`). segment: SHA-256 of its bytes.
        package, version: what built it. builder_gpu: on which full TensorRT timed its tactics; "" for RTX.
        unavailable: the package was missing, or another one, where it was timed.
    """

    own: str
    segment: str
    package: str
    version: str
    builder_gpu: str
    time_us: float | None
    own_us: float | None = None
    reason: str | None = None
    unavailable: bool = False

    @property
    def builder(self) -> tuple[str, str, str]:
        """Package, version and GPU: what has built the segment."""
        return self.package, self.version, self.builder_gpu


class GpuTimings:
    """Outcomes of one GPU in a cache."""

    def __init__(self, cache: TimingCache, gpu: Gpu) -> None:
        self._cache, self.gpu = cache, gpu

    def get(self, signature: str, kind: str, conditions: str, rows: int, kernel_hash: str) -> Outcome | None:
        """What is known of a candidate; None when it was never measured."""
        entry = self._cache.entries.get(self._key(signature, kind, conditions), {})
        found = entry.get("rows", {}).get(str(rows), {}).get(kernel_hash)
        if found is None:
            return None
        stored = found.get("algorithm")
        algorithm = None if stored is None else MatmulAlgorithm(**stored)
        return Outcome(found.get("time_us"), found.get("reason"), algorithm)

    def put(
        self,
        signature: str,
        kind: str,
        conditions: str,
        rows: int,
        kernel_hash: str,
        tactic: str,
        outcome: Outcome,
    ) -> None:
        """Record an outcome; the cache's `save` writes it."""
        fresh = {"signature": signature, "kind": kind, "conditions": conditions, "gpu": asdict(self.gpu)}
        key = self._key(signature, kind, conditions)
        entry = self._cache.entries.setdefault(key, {**fresh, "rows": {}})
        told: dict[str, object] = {"reason": outcome.reason}
        if outcome.time_us is not None:
            told = {"time_us": outcome.time_us}
            if outcome.algorithm is not None:
                told["algorithm"] = asdict(outcome.algorithm)
        entry["rows"].setdefault(str(rows), {})[kernel_hash] = {"tactic": tactic, **told}
        self._cache.changed = True

    def get_step(
        self, order: Sequence[str], kind: str, conditions: str, rows: int, plans: str
    ) -> StepOutcome | None:
        """What is known of a whole step; None when it was never measured.

        `order`: its signatures. `plans`: digest of the candidates it was found among.
        """
        entry = self._cache.entries.get(self._key(list(order), kind, conditions), {})
        found = entry.get("rows", {}).get(str(rows), {}).get(plans)
        if found is None:
            return None
        return StepOutcome(
            found.get("time_us"), found.get("alone_us"), found.get("winners", {}), found.get("reason")
        )

    def put_step(
        self, order: Sequence[str], kind: str, conditions: str, rows: int, plans: str, outcome: StepOutcome
    ) -> None:
        """Record a whole step; the cache's `save` writes it."""
        fresh = {"order": list(order), "kind": kind, "conditions": conditions, "gpu": asdict(self.gpu)}
        key = self._key(list(order), kind, conditions)
        entry = self._cache.entries.setdefault(key, {**fresh, "rows": {}})
        told: dict[str, object] = {"reason": outcome.reason}
        if outcome.time_us is not None:
            winners = dict(outcome.winners)
            told = {"time_us": outcome.time_us, "alone_us": outcome.alone_us, "winners": winners}
        entry["rows"].setdefault(str(rows), {})[plans] = told
        self._cache.changed = True

    def get_regions(
        self, region: str, kind: str, conditions: str, rows: int, own: str = ""
    ) -> tuple[RegionOutcome, ...]:
        """What is known of a region's segments, in an order that does not change.

        `region`: its digest. `own`: digest of our kernels that they were timed against; "" for any.
        """
        entry = self._cache.entries.get(self._key(["region", region], kind, conditions), {})
        found = entry.get("rows", {}).get(str(rows), {})
        outcomes = (RegionOutcome(**found[key]) for key in sorted(found))
        return tuple(o for o in outcomes if own in {"", o.own})

    def put_region(self, region: str, kind: str, conditions: str, rows: int, outcome: RegionOutcome) -> None:
        """Record a region; the cache's `save` writes it. That a package is missing hides no time."""
        fresh = {"region": region, "kind": kind, "conditions": conditions, "gpu": asdict(self.gpu)}
        key = self._key(["region", region], kind, conditions)
        entry = self._cache.entries.setdefault(key, {**fresh, "rows": {}})
        both = json.dumps([outcome.own, outcome.segment, outcome.package, outcome.version])
        place = hashlib.sha256(both.encode()).hexdigest()[:32]
        known = entry["rows"].setdefault(str(rows), {})
        if outcome.unavailable and place in known and not known[place]["unavailable"]:
            return
        known[place] = asdict(outcome)
        self._cache.changed = True

    def knows_regions(self) -> bool:
        """Has a region been timed on this GPU, whichever?"""
        gpu = asdict(self.gpu)
        return any("region" in entry and entry["gpu"] == gpu for entry in self._cache.entries.values())

    def _key(self, what: str | list[str], kind: str, conditions: str) -> str:
        text = json.dumps([what, kind, conditions, asdict(self.gpu)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def plan_digest(times_us: Mapping[str, Mapping[str, float]], fixed: frozenset[str]) -> str:
    """What the answer for a whole step belongs to: the finalists of every op.

    Args:
        times_us: by signature and `timed_key`, each with at least one.
        fixed: signatures of which the fastest alone is the only one.
    """
    names = {k: finalists(times)[: 1 if k in fixed else None] for k, times in times_us.items()}
    return hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()[:32]


def changed_ops(
    order: Sequence[str], times_us: Mapping[str, Mapping[str, float]], winners: Mapping[str, str]
) -> int:
    """Ops of a whole step whose winner is not the fastest alone."""
    alone = {key: kernel_hash_of(finalists(times)[0]) for key, times in times_us.items()}
    return sum(alone[key] != winners[key] for key in order)


def gpus_in(cache: TimingCache, sm: int) -> list[Gpu]:
    """GPUs of a compute capability that the cache holds timings of."""
    found = {Gpu(**entry["gpu"]) for entry in cache.entries.values() if "gpu" in entry}
    return sorted(gpu for gpu in found if gpu.sm == sm)


def gpus_meant(cache: TimingCache, target: str, sm: int) -> list[Gpu]:
    """Those of them that a target could mean: of its model, if it names one."""
    gpus, sku = gpus_in(cache, sm), target.removeprefix("cuda:")
    if sku not in SKUS:
        return gpus
    gpus = [gpu for gpu in gpus if is_model(gpu.name, sku)]
    return [gpu for gpu in gpus if gpu.sm_count == SKUS[sku].sm_count] or gpus


def timings_for(cache: TimingCache, target: str, sm: int) -> GpuTimings | None:
    """The timings that serve a target; None when the cache holds none.

    Raises UsageError where it holds those of several GPUs that the target could mean.
    """
    gpus, sku = gpus_meant(cache, target, sm), target.removeprefix("cuda:")
    if len(gpus) > 1:
        hint = "name the model: " + ", ".join(f"cuda:{name}" for name, s in SKUS.items() if s.sm == sm)
        if sku in SKUS:
            hint = "keep a timing cache for each of them"
        listed = "".join(f"\n  {gpu.text()}" for gpu in gpus)
        raise UsageError(
            f"timing cache {cache.path} holds timings of {len(gpus)} GPUs that {target} could mean:{listed}",
            hint=hint,
        )
    return GpuTimings(cache, gpus[0]) if gpus else None
