"""From events to steps: what each step did with every request, one step after the other.

Nothing is kept but the requests that are there and the last two steps: a step is complete when the one
after the next was planned, because ends are seen up to one step late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: Reasons of running requests without rows begin so; this one does not wait for anything.
_ENDING = "no rows: its last token"


@dataclass
class StepView:
    """One step.

    Attributes:
        context: (id, start, tokens, reason). generation: ids.
        held: id to reason, of all that did not run: the first of the queue with what it lacks, those
            behind it, and running ones without rows.
        ending: ids that run no more and whose last token has not been read.
        paused: id to reason, paused by this step. resting: ids that were paused and wait.
        finished: id to how it ended, in the order of the ends.
        numbers: id to number of arrival, of all that were there.
    """

    step: int
    numbers: dict[str, int] = field(default_factory=dict)
    context: list[tuple[str, int, int, str]] = field(default_factory=list)
    generation: list[str] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    ending: list[str] = field(default_factory=list)
    admitted: dict[str, str] = field(default_factory=dict)
    paused: dict[str, str] = field(default_factory=dict)
    resting: list[str] = field(default_factory=list)
    finished: dict[str, str] = field(default_factory=dict)
    pages_used: int = 0

    def as_json(self) -> dict[str, Any]:
        """The step as `tapeout simulate --json` gives it."""
        return {
            "step": self.step,
            "context": [{"id": i, "start": s, "tokens": n} for i, s, n, _ in self.context],
            "generation": self.generation,
            "held": [{"id": i, "reason": reason} for i, reason in self.held.items()],
            "paused": list(self.paused),
            "finished": list(self.finished),
        }


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
        self.pauses = self.recomputed_tokens = 0
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
            "mean_queue_steps": round(self._waited / self._waits, 3) if self._waits else None,
            "max_queue_steps": self._most_waited if self._waits else None,
            "max_running": self.most_running,
            "max_waiting": self.most_waiting,
            "max_pages_used": self.most_pages,
            "settings": self.settings,
        }


_SHOWN_REFUSALS = 100


class StepBuilder:
    """Takes events in their order and gives steps once they are complete.

    Args:
        in_full: whether a step is wanted with everybody who waits in `held`, `resting` and `numbers`, and
            not only the first of the queue: then it costs as much as there are. It is called with the
            step's number, once for each step. None = never.
    """

    def __init__(self, in_full: Callable[[int], bool] | None = None) -> None:
        self.summary = Summary()
        self._in_full = in_full
        self._waiting: dict[str, bool] = {}  # id to whether it was paused, in order of arrival
        self._arrived: dict[str, int] = {}  # of those that never ran
        self._views: deque[StepView] = deque()
        self._numbers: dict[str, int] = {}  # of arrival, of those that have not ended
        self._early: dict[str, str] = {}  # ends before any step was there
        self._running = 0

    def take(self, event: dict[str, Any]) -> Iterator[StepView]:
        """The steps that are complete with this event."""
        kind = event["event"]
        if kind == "step":
            self._views.append(self._step(event))
            while len(self._views) > 2:
                yield self._views.popleft()
        elif kind == "arrived":
            self.summary.requests += 1
            self._waiting[event["id"]] = False
            self._numbers[event["id"]] = self.summary.requests
            self._arrived[event["id"]] = event["step"]
            self.summary.most_waiting = max(self.summary.most_waiting, len(self._waiting))
        elif kind == "finished":
            self._finish(event)
        elif kind == "start":
            self.summary.settings = {k: v for k, v in event.items() if k not in ("event", "format")}

    def rest(self) -> Iterator[StepView]:
        """The last steps, after the last event."""
        while self._views:
            yield self._views.popleft()

    def _step(self, event: dict[str, Any]) -> StepView:
        summary, view = self.summary, StepView(event["step"], finished=self._early)
        self._early = {}
        for admitted in event.get("admitted", ()):
            name = admitted["id"]
            view.admitted[name] = admitted["reason"]
            self._waiting.pop(name, None)
            self._running += 1
            if (arrived := self._arrived.pop(name, None)) is not None:
                summary.waited(view.step - arrived)
            summary.recomputed_tokens += admitted.get("recompute_tokens", 0)
        for paused in event.get("paused", ()):
            view.paused[paused["id"]] = paused["reason"]
            self._waiting[paused["id"]] = True
            self._running -= 1
            summary.pauses += 1
        self._hold(view, event)
        for row in event.get("context", ()):
            view.context.append((row["id"], row["start"], row["tokens"], row["reason"]))
            summary.context_tokens += row["tokens"]
        view.generation = event.get("generation", [])
        view.pages_used = event["pages_used"]
        summary.steps += 1
        summary.first_step = view.step if summary.first_step is None else summary.first_step
        summary.last_step = view.step
        summary.most_running = max(summary.most_running, self._running)
        summary.most_waiting = max(summary.most_waiting, len(self._waiting))
        summary.most_pages = max(summary.most_pages, view.pages_used)
        return view

    def _hold(self, view: StepView, event: dict[str, Any]) -> None:
        head = event.get("held")
        if head is not None:
            view.held[head["id"]] = head["reason"]
        if self._in_full is not None and self._in_full(view.step):
            view.numbers = dict(self._numbers)
            for name, was_paused in self._waiting.items():
                if was_paused:
                    view.resting.append(name)
                if name not in view.held:
                    state = "paused" if was_paused else "waiting"
                    behind = f"behind {head['id']}" if head is not None else "its pages are not back yet"
                    view.held[name] = f"{state}: {behind}"
        for row in event.get("left_out", ()):
            if row["reason"].startswith(_ENDING):
                view.ending.append(row["id"])
            else:
                view.held[row["id"]] = row["reason"]

    def _finish(self, event: dict[str, Any]) -> None:
        name, reason, summary = event["id"], event["reason"], self.summary
        summary.finished[reason] = summary.finished.get(reason, 0) + 1
        summary.output_tokens += event["output_tokens"]
        self._numbers.pop(name, None)
        if self._waiting.pop(name, None) is None:
            self._running -= 1
        if self._arrived.pop(name, None) is not None and reason == "error":
            if len(summary.refused) < _SHOWN_REFUSALS:
                summary.refused.append({"id": name, "reason": event["message"]})
            return  # it was in no step
        view = next((v for v in reversed(self._views) if v.step <= event["step"]), None)
        (self._early if view is None else view.finished)[name] = reason


def steps_of(events: Iterable[dict[str, Any]], builder: StepBuilder) -> Iterator[StepView]:
    """All steps of a stream of events."""
    for event in events:
        yield from builder.take(event)
    yield from builder.rest()
