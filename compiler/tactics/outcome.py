"""What came of checking and timing one tactic."""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.plugins.cuda import MatmulAlgorithm


@dataclass(frozen=True)
class Outcome:
    """Microseconds a call (on a CPU in the fastest pass, on a GPU the median of replays), or why the
    tactic may not be used; for a tactic whose product a library computes, the algorithm timed."""

    time_us: float | None
    reason: str | None = None
    algorithm: MatmulAlgorithm | None = None
