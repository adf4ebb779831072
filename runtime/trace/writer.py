"""Writes what the loop decides as JSON lines, as it is decided. The lines are described in README.md."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import IO, Any

from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.plugins.sample.params import shown
from tapeout.runtime.scheduler.record import StepRecord
from tapeout.runtime.scheduler.request import FinishReason, Request

logger = logging.getLogger("tapeout")

TRACE_FORMAT = 1


def step_event(record: StepRecord) -> dict[str, Any]:
    """A step as one line: what is not there did not happen."""
    plan = record.plan
    event: dict[str, Any] = {"event": "step", "step": plan.step}
    if record.admitted:
        event["admitted"] = [
            {"id": a.request_id, "slot": a.slot, "reason": a.reason()}
            | ({"cached_tokens": a.cached_tokens} if a.cached_tokens else {})
            | ({"resumed": True, "recompute_tokens": a.recompute_tokens} if a.resumed else {})
            for a in record.admitted
        ]
    if record.paused:
        event["paused"] = [
            {"id": p.request_id, "pages": p.pages, "reason": p.reason()} for p in record.paused
        ]
    if record.evicted:
        event["evicted"] = [
            {"id": e.request_id, "pages": e.pages, "for": [*e.made_room_for], "reason": e.reason()}
            | ({"to_host": e.to_host} if e.to_host else {})
            for e in record.evicted
        ]
    if record.held is not None:
        event["held"] = {"id": record.held.request_id, "reason": record.held.reason()}
    if record.num_waiting:
        event["waiting"] = record.num_waiting
    if plan.num_context:
        event["context"] = [
            {"id": s.request_id, "start": s.start, "tokens": s.num_tokens, "reason": s.reason.value}
            for s in plan.context
        ]
    if plan.num_sequences > plan.num_context:
        event["generation"] = plan.request_ids[plan.num_context :]
    if plan.left_out:
        event["left_out"] = [{"id": s.request_id, "reason": s.reason.value} for s in plan.skipped]
    event["pages_used"] = record.pages_used
    return event


class EventMaker:
    """An `Observer` that hands every event on as plain data."""

    def __init__(self, take: Callable[[dict[str, Any]], None]) -> None:
        self._take = take

    def on_arrival(self, request: Request, step: int) -> None:
        event = {
            "event": "arrived",
            "id": request.request_id,
            "step": step,
            "prompt_tokens": request.prompt_tokens,
            "max_tokens": request.max_tokens,
        }
        self._take(event | ({"priority": request.priority} if request.priority else {}))

    def on_step(self, record: StepRecord) -> None:
        self._take(step_event(record))

    def on_finish(self, request: Request, step: int, output_tokens: int) -> None:
        assert request.finish is not None
        event = {
            "event": "finished",
            "id": request.request_id,
            "step": step,
            "reason": request.finish.reason.value,
            "output_tokens": output_tokens,
        }
        if request.finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
            event["message"] = request.finish.stop_reason
        self._take(event)


def start_event(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The first line of a trace: its format, and what the schedulers were given."""
    return {"event": "start", "format": TRACE_FORMAT, **settings}


class TraceWriter:
    """Writes events to a stream, a line each, as they come.

    A trace must not take down the requests it tells about: the first error of the file is logged, no
    more is written, and `close` raises it.
    """

    def __init__(self, stream: IO[str], name: str) -> None:
        self._stream = stream
        self._name = name
        self._error: OSError | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        if self._error is None and not self._stream.closed:
            try:
                self._stream.write(json.dumps(event) + "\n")
            except OSError as error:
                self._failed(error)

    def close(self) -> None:
        """Close the file; may be called again.

        Raises:
            TapeoutError: some of the trace could not be written.
        """
        if self._stream.closed:
            return
        try:
            self._stream.close()
        except OSError as error:
            self._failed(error)
        if self._error is not None:
            raise TapeoutError(
                f"the trace {self._name!r} is not complete: {self._error.strerror or self._error}",
                hint="everything else was done; choose another file, or free space",
            )

    def _failed(self, error: OSError) -> None:
        if self._error is None:
            self._error = error
            logger.error("the trace %r cannot be written: %s", self._name, error.strerror or error)


def open_trace(path: str | os.PathLike[str]) -> TraceWriter:
    """A new trace file; one of that name is replaced.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        name = os.fsdecode(path)
        stream = open(name, "w", encoding="utf-8")  # noqa: SIM115, PTH123  (closed by the writer)
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "expected the path of a file"
        raise UsageError(
            f"trace = {shown(path)} cannot be written: {reason}",
            hint="name a file in a directory you may write to",
        ) from None
    return TraceWriter(stream, name)
