"""From events to steps: what each step did with every request, one step after the other.

Nothing is kept but the requests that are there and the last two steps: a step is complete when the one
after the next was planned, because ends are seen up to one step late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tapeout.runtime.trace.tally import Summary, Tally

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
        evicted: (id, pages, reason) of cached pages that made room.
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
    evicted: list[tuple[str, int, str]] = field(default_factory=list)
    finished: dict[str, str] = field(default_factory=dict)
    pages_used: int = 0

    def as_json(self) -> dict[str, Any]:
        """The step as `tapeout simulate --json` gives it; `evicted` is there where there was any."""
        evicted = [{"id": i, "pages": n, "reason": reason} for i, n, reason in self.evicted]
        return ({"evicted": evicted} if evicted else {}) | {
            "step": self.step,
            "context": [{"id": i, "start": s, "tokens": n} for i, s, n, _ in self.context],
            "generation": self.generation,
            "held": [{"id": i, "reason": reason} for i, reason in self.held.items()],
            "paused": list(self.paused),
            "finished": list(self.finished),
        }


class StepBuilder:
    """Takes events in their order and gives steps once they are complete.

    Args:
        in_full: whether a step is wanted with everybody who waits in `held`, `resting` and `numbers`, and
            not only the first of the queue: then it costs as much as there are. It is called with the
            step's number, once for each step. None = never.
    """

    def __init__(self, in_full: Callable[[int], bool] | None = None) -> None:
        self._tally = Tally()
        self._in_full = in_full
        self._views: deque[StepView] = deque()
        self._numbers: dict[str, int] = {}  # of arrival, of those that have not ended
        self._early: dict[str, str] = {}  # ends before any step was there

    @property
    def summary(self) -> Summary:
        return self._tally.summary

    def take(self, event: dict[str, Any]) -> Iterator[StepView]:
        """The steps that are complete with this event."""
        kind = event["event"]
        if kind == "step":
            self._views.append(self._step(event))
            while len(self._views) > 2:
                yield self._views.popleft()
        elif kind == "arrived":
            self._tally.arrived(event["id"], event["step"])
            self._numbers[event["id"]] = self.summary.requests
        elif kind == "finished":
            self._finish(event)
        elif kind == "start":
            self.summary.settings = {k: v for k, v in event.items() if k not in ("event", "format")}

    def rest(self) -> Iterator[StepView]:
        """The last steps, after the last event."""
        while self._views:
            yield self._views.popleft()

    def _step(self, event: dict[str, Any]) -> StepView:
        tally, view = self._tally, StepView(event["step"], finished=self._early)
        self._early = {}
        for admitted in event.get("admitted", ()):
            view.admitted[admitted["id"]] = admitted["reason"]
            tally.admitted(admitted["id"], view.step, admitted.get("recompute_tokens", 0))
        for paused in event.get("paused", ()):
            view.paused[paused["id"]] = paused["reason"]
            tally.paused(paused["id"])
        for evicted in event.get("evicted", ()):
            view.evicted.append((evicted["id"], evicted["pages"], evicted["reason"]))
            tally.evicted(evicted["pages"])
        self._hold(view, event)
        for row in event.get("context", ()):
            view.context.append((row["id"], row["start"], row["tokens"], row["reason"]))
        view.generation = event.get("generation", [])
        view.pages_used = event["pages_used"]
        tally.stepped(view.step, sum(tokens for _, _, tokens, _ in view.context), view.pages_used)
        return view

    def _hold(self, view: StepView, event: dict[str, Any]) -> None:
        head = event.get("held")
        if head is not None:
            view.held[head["id"]] = head["reason"]
        if self._in_full is not None and self._in_full(view.step):
            view.numbers = dict(self._numbers)
            for name, was_paused in self._tally.waiting.items():
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
        name, reason = event["id"], event["reason"]
        self._numbers.pop(name, None)
        if self._tally.finished(name, reason, event["output_tokens"], event.get("message")):
            view = next((v for v in reversed(self._views) if v.step <= event["step"]), None)
            (self._early if view is None else view.finished)[name] = reason


def steps_of(events: Iterable[dict[str, Any]], builder: StepBuilder) -> Iterator[StepView]:
    """All steps of a stream of events."""
    for event in events:
        yield from builder.take(event)
    yield from builder.rest()
