"""What timing a pack found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tapeout.plugins.cuda import MatmulAlgorithm
from tapeout.runtime.engine.target import GpuFacts


@dataclass(frozen=True)
class Result:
    """Microseconds a call of a candidate, or why it may not be used.

    algorithm: what its product was timed with. unavailable: it was not tried, for want of a library.
    """

    time_us: float | None
    reason: str | None = None
    algorithm: MatmulAlgorithm | None = None
    unavailable: bool = False


@dataclass(frozen=True)
class StepResult:
    """Microseconds of a whole step by its fastest plan and by that of the fastest alone, or why it cannot
    run.

    winners: entry to candidate of the fastest plan.
    """

    time_us: float | None
    alone_us: float | None = None
    winners: Mapping[int, int] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class RegionResult:
    """Microseconds of a region by its segment and by the fastest of our kernels, or why the segment may not
    be used. unavailable: its package is not there."""

    time_us: float | None
    own_us: float | None = None
    reason: str | None = None
    unavailable: bool = False


@dataclass
class PackTimes:
    """What was found out.

    Attributes:
        gpu: where.
        results: entry and candidate index to result; absent where an entry was skipped.
        skipped: entry index to why nothing was measured, for example too little memory.
        steps, skipped_steps: the same of whole steps, by their index; regions, skipped_regions: of regions.
        restarts: how often the worker was started again.
        seconds: all of it took.
    """

    gpu: GpuFacts
    results: dict[tuple[int, int], Result] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    steps: dict[int, StepResult] = field(default_factory=dict)
    skipped_steps: dict[int, str] = field(default_factory=dict)
    regions: dict[int, RegionResult] = field(default_factory=dict)
    skipped_regions: dict[int, str] = field(default_factory=dict)
    restarts: int = 0
    seconds: float = 0.0
