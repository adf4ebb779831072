"""What one turn of the loop decides, kept until the turn's record is told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.kv_cache.users import PageEvictions
from tapeout.runtime.scheduler.capacity import Admission, Held
from tapeout.runtime.scheduler.plan import StepPlan
from tapeout.runtime.scheduler.record import Pause, PauseCause, StepRecord, evictions_of
from tapeout.runtime.scheduler.request import Request
from tapeout.runtime.scheduler.running import Running


class Decisions:
    """Admissions and pauses since the last record.

    Attributes:
        admitted, paused: in order; pauses only where somebody listens.
        any: whether anything was decided that a step without rows has to be told for.
    """

    def __init__(self, running: Running, kv_cache: KvCache) -> None:
        self._running, self._kv_cache = running, kv_cache
        self.clear()

    def clear(self) -> None:
        """They have been told."""
        self.admitted: list[Admission] = []
        self.paused: list[Pause] = []
        self.any = False

    def admit(self, admission: Admission) -> None:
        """A request got its slot."""
        self.admitted.append(admission)
        self.any = True

    def pause(
        self,
        requests: Sequence[Request],
        slots: np.ndarray,
        cause: PauseCause,
        short_pages: int,
        is_heard: bool,
    ) -> None:
        """Requests are paused one after the other: what one shares with those before it comes back with them.

        slots: [B] theirs, which they still have.
        """
        self.any |= len(requests) > 0
        if is_heard:
            pages = self._kv_cache.departures(len(slots)).leave(slots)
            planned = self._running.planned_tokens(slots).tolist()
            self.paused += [
                Pause(request.request_id, cause, count, short_pages, tokens)
                for request, count, tokens in zip(requests, pages, planned, strict=True)
            ]

    def record(
        self,
        held: Held | None,
        plan: StepPlan,
        num_waiting: int,
        pages_used: int,
        evicted: Sequence[PageEvictions],
    ) -> StepRecord:
        """All of it, and what it led to."""
        evictions = evictions_of(evicted, plan.names)
        return StepRecord(
            tuple(self.admitted), held, tuple(self.paused), plan, num_waiting, pages_used, evictions
        )
