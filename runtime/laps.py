"""Seconds of the parts of one course of work, such as loading an engine."""

from __future__ import annotations

import time
from collections.abc import Callable


class Laps:
    """A stopwatch: `lap(name)` gives the time since the lap before to `name`.

    Laps follow each other without gaps, so they add up to the whole. Laps of one name are summed.

    Attributes:
        seconds: by name, in order of first appearance.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._last = clock()

    def lap(self, name: str) -> None:
        now = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
