"""Steps that were submitted and have not been read, and the requests that wait for one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tapeout.runtime.scheduler.plan import StepPlan
from tapeout.runtime.scheduler.request import Request
from tapeout.runtime.scheduler.running import Running
from tapeout.runtime.step import StepHandle


@dataclass(frozen=True)
class UnreadStep:
    plan: StepPlan
    handle: StepHandle


class UnreadSteps:
    """In the order in which they were submitted, which is that of reading.

    A request that ends or is paused while a step that holds a row of it is here keeps slot and pages until
    that step has been read: it *drains*.

    Attributes:
        last_read: number of the step that was read last, -1 before.
    """

    def __init__(self, running: Running) -> None:
        self.last_read = -1
        self._running = running
        self._steps: deque[UnreadStep] = deque()
        self._draining: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, plan: StepPlan, handle: StepHandle) -> None:
        self._running.last_step[plan.slots] = plan.step
        self._steps.append(UnreadStep(plan, handle))

    def first(self) -> UnreadStep:
        return self._steps[0]

    def was_read(self) -> None:
        """The first one was read, or failed."""
        self.last_read = self._steps.popleft().plan.step

    def skip_to(self, step: int) -> None:
        """The next step has this number; nothing is here."""
        self.last_read = step - 1

    def hold(self, request: Request) -> bool:
        """Whether the request has to drain; it is kept until `drained` gives it back."""
        if request.request_id in self._draining:
            return True
        if self._in_unread_step(request):
            self._draining[request.request_id] = request
            return True
        return False

    def hold_all(self, requests: list[Request], slots: np.ndarray) -> list[Request]:
        """Hold those of the requests that have to drain, of which none does yet; gives the others.

        slots: [B] theirs.
        """
        others = []
        in_unread_step = self._running.last_step[slots] > self.last_read
        for request, drains in zip(requests, in_unread_step.tolist(), strict=True):
            if drains:
                self._draining[request.request_id] = request
            else:
                others.append(request)
        return others

    def draining(self) -> list[Request]:
        return list(self._draining.values())

    def drained(self) -> Iterator[Request]:
        """Those that waited for steps which have been read by now; each is held until it is its turn, so that
        what becomes of one may end the next."""
        if self._draining:
            for request in [r for r in self._draining.values() if not self._in_unread_step(r)]:
                del self._draining[request.request_id]
                yield request

    def _in_unread_step(self, request: Request) -> bool:
        return bool(self._running.last_step[request.slot] > self.last_read)
