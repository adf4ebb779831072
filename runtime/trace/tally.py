"""Counts over all steps of a trace or a simulation: told event by event, or by the loop itself."""

from __future__ import annotations

from typing import Any

from tapeout.runtime.scheduler.record import StepRecord
from tapeout.runtime.scheduler.request import Request

_SHOWN_REFUSALS = 100


class Summary:
    """Counts over all steps.

    Waits are in steps: from a request's arrival to the step of its first row, and to the end of its
    context, whose step gives the first token.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.requests = self.steps = self.context_tokens = self.output_tokens = 0
        self.finished: dict[str, int] = {}
        self.refused: list[dict[str, str]] = []
        self.pauses = self.recomputed_tokens = self.evicted_pages = 0
        self.most_running = self.most_waiting = self.most_pages = 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        self._waits = self._waited = self._most_waited = 0

    def waited(self, steps: int) -> None:
        self._waits += 1
        self._waited += steps
        self._most_waited = max(self._most_waited, steps)

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "finished": self.finished,
            "refused": self.refused,
            "steps": self.steps,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "context_tokens": self.context_tokens,
            "output_tokens": self.output_tokens,
            "pauses": self.pauses,
            "recomputed_tokens": self.recomputed_tokens,
            "evicted_pages": self.evicted_pages,
            "mean_queue_steps": round(self._waited / self._waits, 3) if self._waits else None,
            "max_queue_steps": self._most_waited if self._waits else None,
            "max_running": self.most_running,
            "max_waiting": self.most_waiting,
            "max_pages_used": self.most_pages,
            "settings": self.settings,
        }


class Tally:
    """Follows the requests that are there, as far as a summary needs them.

    Attributes:
        waiting: id to whether it was paused, in order of arrival.
    """

    def __init__(self) -> None:
        self.summary = Summary()
        self.waiting: dict[str, bool] = {}
        self._arrived: dict[str, int] = {}  # of those that never ran
        self._running = 0

    def arrived(self, name: str, step: int) -> None:
        self.summary.requests += 1
        self.waiting[name] = False
        self._arrived[name] = step
        self.summary.most_waiting = max(self.summary.most_waiting, len(self.waiting))

    def admitted(self, name: str, step: int, recompute_tokens: int) -> None:
        self.waiting.pop(name, None)
        self._running += 1
        if (arrived := self._arrived.pop(name, None)) is not None:
            self.summary.waited(step - arrived)
        self.summary.recomputed_tokens += recompute_tokens

    def paused(self, name: str) -> None:
        self.waiting[name] = True
        self._running -= 1
        self.summary.pauses += 1

    def evicted(self, pages: int) -> None:
        self.summary.evicted_pages += pages

    def stepped(self, step: int, context_tokens: int, pages_used: int) -> None:
        """All admissions and pauses of the step have been told."""
        summary = self.summary
        summary.steps += 1
        summary.context_tokens += context_tokens
        summary.first_step = step if summary.first_step is None else summary.first_step
        summary.last_step = step
        summary.most_running = max(summary.most_running, self._running)
        summary.most_waiting = max(summary.most_waiting, len(self.waiting))
        summary.most_pages = max(summary.most_pages, pages_used)

    def finished(self, name: str, reason: str, output_tokens: int, message: Any) -> bool:
        """Whether it ever was there: one that was refused was in no step."""
        summary = self.summary
        summary.finished[reason] = summary.finished.get(reason, 0) + 1
        summary.output_tokens += output_tokens
        if self.waiting.pop(name, None) is None:
            self._running -= 1
        if self._arrived.pop(name, None) is None or reason != "error":
            return True
        if len(summary.refused) < _SHOWN_REFUSALS:
            summary.refused.append({"id": name, "reason": message})
        return False


class SummaryObserver:
    """An `Observer` that counts and keeps nothing else: no event is made."""

    def __init__(self) -> None:
        self._tally = Tally()

    @property
    def summary(self) -> Summary:
        return self._tally.summary

    def on_arrival(self, request: Request, step: int) -> None:
        self._tally.arrived(request.request_id, step)

    def on_step(self, record: StepRecord) -> None:
        tally, plan = self._tally, record.plan
        for admission in record.admitted:
            tally.admitted(admission.request_id, plan.step, admission.recompute_tokens)
        for pause in record.paused:
            tally.paused(pause.request_id)
        for eviction in record.evicted:
            tally.evicted(eviction.pages)
        tally.stepped(plan.step, plan.context_rows, record.pages_used)

    def on_finish(self, request: Request, step: int, output_tokens: int) -> None:
        finish = request.finish
        assert finish is not None
        self._tally.finished(request.request_id, finish.reason.value, output_tokens, finish.stop_reason)
