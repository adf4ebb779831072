"""Choose a tactic for every op signature and range of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tapeout.compiler.plan import buckets, max_rows
from tapeout.compiler.report import StepTiming, TacticTiming
from tapeout.compiler.tactics.cache import Machine, TimingCache
from tapeout.compiler.tactics.case import make_case, make_weights
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.compiler.tactics.timing import failure, measure, reference_outputs
from tapeout.compiler.tactics.usable import split_usable
from tapeout.plugins.cpu import CpuTactic, HostCpu, OpSignature
from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.registry import cpu_tactics
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program import TacticRange

_ROTATION_BYTES = 64 << 20  # weights a timing pass streams: larger than the last-level caches


@dataclass(frozen=True)
class Choices:
    """Ranges by signature key, and what was measured for the report."""

    ranges: Mapping[str, tuple[TacticRange, ...]]
    timings: tuple[TacticTiming, ...]
    timed: bool
    steps: tuple[StepTiming, ...] = ()


def select_tactics(
    signatures: Mapping[str, OpSignature],
    limits: Limits,
    host: HostCpu,
    machine: Machine,
    cache: TimingCache,
    *,
    kernels: Any,
    seed: int,
    batch_invariant: bool,
    progress: Callable[[str], None] = lambda text: None,
) -> Choices:
    """Time what the cache does not know and pick the fastest correct tactic at every anchor.

    Args:
        kernels: the loaded native library.
        batch_invariant: one tactic for all rows, among those whose rows do not depend on company.

    Raises:
        TapeoutError: no tactic of an op gave the right result.
    """
    ranges, timings = {}, []
    for index, (key, signature) in enumerate(signatures.items(), start=1):
        progress(f"{index} of {len(signatures)} {signature.op}")
        candidates, rejected = _candidates(signature, host, batch_invariant)
        if not candidates:
            raise _none_works(key, [f"  {name}: {reason}" for name, reason in rejected.items()])
        timer = _Timer(signature, candidates, limits, seed, kernels)
        outcomes: dict[int, dict[str, Outcome]] = {}
        known: dict[int, bool] = {}
        for rows in buckets(max_rows(signature.outputs[0].shape, limits)):
            cached = cache.get(key, machine, rows, {t.name for t in candidates})
            known[rows] = cached is not None
            outcomes[rows] = cached if cached is not None else timer.measure(rows)
            if cached is None:
                cache.put(key, machine, rows, outcomes[rows])
        winners = _winners(key, outcomes, batch_invariant)
        ranges[key] = _as_ranges(winners)
        timings += [
            _report(key, rows, winners[rows], outcomes[rows], rejected, known[rows]) for rows in outcomes
        ]
    return Choices(ranges, tuple(timings), timed=True)


def choose_untimed(
    signatures: Mapping[str, OpSignature], limits: Limits, host: HostCpu, batch_invariant: bool
) -> Choices:
    """The last usable tactic of each op for all rows, with nothing measured: for dry runs."""
    ranges = {}
    for key, signature in signatures.items():
        usable, rejected = _candidates(signature, host, batch_invariant)
        if not usable:
            raise _none_works(key, [f"  {name}: {reason}" for name, reason in rejected.items()])
        ranges[key] = (TacticRange(max_rows(signature.outputs[0].shape, limits), usable[-1].name),)
    return Choices(ranges, (), timed=False)


def _candidates(
    signature: OpSignature, host: HostCpu, batch_invariant: bool
) -> tuple[list[CpuTactic], dict[str, str]]:
    """Tactics that can run the signature here, and why the others cannot."""
    return split_usable(
        cpu_tactics(signature.op), lambda tactic: tactic.unsupported(signature, host), batch_invariant
    )


class _Timer:
    """Measures one signature; weights are made and prepared once, at the first measurement."""

    def __init__(
        self,
        signature: OpSignature,
        candidates: list[CpuTactic],
        limits: Limits,
        seed: int,
        kernels: Any,
    ) -> None:
        self.signature, self.candidates, self.limits, self.seed = signature, candidates, limits, seed
        self.kernels = kernels
        self.weights: tuple[tuple[torch.Tensor | None, ...], ...] | None = None
        self.prepared: dict[str, list[Any]] = {}

    def measure(self, rows: int) -> dict[str, Outcome]:
        """Check and time every candidate at `rows` rows."""
        if self.weights is None:
            self.weights = make_weights(self.signature, _ROTATION_BYTES, self.seed)
        case = make_case(self.signature, rows, self.weights, self.limits, self.seed)
        expected = reference_outputs(self.signature, case)
        outcomes: dict[str, Outcome] = {}
        best_us = math.inf
        # The library baseline stands first in the list and is mostly slowest: measured last, it loses fast.
        for tactic in reversed(self.candidates):
            try:
                prepared = self._prepared(tactic)
            except Exception as error:  # a lost candidate, not a lost build
                outcomes[tactic.name] = failure(error)
                continue
            outcome = measure(tactic, self.signature, case, expected, prepared, self.kernels, best_us)
            if outcome.time_us is not None:
                best_us = min(best_us, outcome.time_us)
            outcomes[tactic.name] = outcome
        return outcomes

    def _prepared(self, tactic: CpuTactic) -> list[Any]:
        assert self.weights is not None
        if tactic.name not in self.prepared:
            self.prepared[tactic.name] = [tactic.prepare(w, self.signature.attrs) for w in self.weights]
        return self.prepared[tactic.name]


def _winners(key: str, outcomes: Mapping[int, Mapping[str, Outcome]], one_for_all: bool) -> dict[int, str]:
    """The fastest tactic by rows; with `one_for_all` the one with the least time summed over anchors."""
    valid = {
        rows: {name: o.time_us for name, o in row.items() if o.time_us is not None}
        for rows, row in outcomes.items()
    }
    if one_for_all:
        names = set.intersection(*(set(v) for v in valid.values()))
        valid = {rows: {n: sum(v[n] for v in valid.values()) for n in names} for rows in valid}
    if empty := [rows for rows, v in valid.items() if not v]:
        # With one tactic for all rows, an anchor where it is right does not help.
        failed = outcomes if one_for_all else empty
        raise _none_works(
            key,
            [
                f"  {rows} rows, {name}: {o.reason}"
                for rows in failed
                for name, o in outcomes[rows].items()
                if o.time_us is None
            ],
        )
    return {rows: min(v, key=lambda name: (v[name], name)) for rows, v in valid.items()}


def _none_works(key: str, reasons: list[str]) -> TapeoutError:
    return TapeoutError(
        f"no tactic computes {key} on this machine:\n" + "\n".join(reasons),
        hint="another --dtype or --quantize uses other tactics",
    )


def _as_ranges(winners: Mapping[int, str]) -> tuple[TacticRange, ...]:
    """An anchor's winner serves the rows above the previous anchor; equal neighbours merge."""
    ranges: list[TacticRange] = []
    for rows, tactic in sorted(winners.items()):
        if ranges and ranges[-1].tactic == tactic:
            ranges.pop()
        ranges.append(TacticRange(rows, tactic))
    return tuple(ranges)


def _report(
    key: str,
    rows: int,
    winner: str,
    outcomes: Mapping[str, Outcome],
    rejected: Mapping[str, str],
    cached: bool,
) -> TacticTiming:
    failed = {name: str(o.reason) for name, o in outcomes.items() if o.time_us is None}
    losers = {name: o.time_us for name, o in outcomes.items() if o.time_us is not None and name != winner}
    return TacticTiming(key, rows, winner, outcomes[winner].time_us, losers, {**rejected, **failed}, cached)
