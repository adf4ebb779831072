"""Which tactics make the fastest step: no candidate is judged by its own time alone.

What a kernel leaves to its neighbours (shared memory, a part of the L2 cache, a start before the launch
ahead has ended) shows among them only. Here is the search; what it compares is timed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tapeout.plugins.cuda import MatmulAlgorithm

#: A candidate this many times slower than the best alone may still win a step; more was never seen.
NEAR = 1.15
#: Candidates of an op that are tried in a step, at most: every one costs a graph a bucket.
FINALISTS = 4
#: A share of a step's time that its medians do not tell from nothing.
NOISE = 0.003
_PASSES = 2

#: The candidate that runs each entry, by their indices in the pack.
Plan = dict[int, int]


@dataclass(frozen=True)
class Found:
    """The fastest plan, and the times in microseconds of a step by it and by that of the fastest alone."""

    plan: Plan
    time_us: float
    alone_us: float


def timed_key(kernel_hash: str, algorithm: MatmulAlgorithm | None) -> str:
    """What a time belongs to: a candidate's digest, and the algorithm of its product where it has one."""
    return kernel_hash if algorithm is None else f"{kernel_hash} {algorithm.data}"


def kernel_hash_of(key: str) -> str:
    """The candidate's digest in a `timed_key`."""
    return key.partition(" ")[0]


def finalists(times_us: Mapping[str, float]) -> tuple[str, ...]:
    """Candidates of an op that are tried in a step, the fastest alone first.

    Builder and GPU machine must agree on them, so both call this with the times by `timed_key`: an
    answer belongs to the finalists it was found among.
    """
    ranked = sorted(times_us, key=lambda name: (times_us[name], name))
    return tuple(n for n in ranked[:FINALISTS] if times_us[n] <= NEAR * times_us[ranked[0]])


def fastest_plan(
    rivals: Mapping[int, Sequence[int]],
    shares_us: Mapping[int, float],
    compare: Callable[[Plan, Plan], tuple[float, float]],
) -> Found:
    """Coordinate descent from the fastest alone; at last those two plans are compared once more.

    Args:
        rivals: finalists of every entry, the fastest alone first.
        shares_us: what an entry's ops take of a step, by their times alone.
        compare: microseconds of a step by each of two plans, timed in turns.
    """
    start = {entry: names[0] for entry, names in rivals.items()}
    # Who takes less of a step than noise cannot make it faster.
    least_us = NOISE * sum(shares_us.values())
    order = [e for e, names in rivals.items() if len(names) > 1 and shares_us[e] > least_us]
    order.sort(key=lambda entry: (-shares_us[entry], entry))
    plan, settled = start, 0  # entries tried since the plan changed
    for entry in order * _PASSES:
        if settled == len(order):
            break
        settled += 1
        for rival in rivals[entry]:
            if rival == plan[entry]:
                continue
            trial = {**plan, entry: rival}
            now_us, trial_us = compare(plan, trial)
            if trial_us < now_us * (1 - NOISE):
                plan, settled = trial, 1
    alone_us, time_us = compare(start, plan)
    if plan != start and time_us < alone_us:
        return Found(plan, time_us, alone_us)
    return Found(start, alone_us, alone_us)
