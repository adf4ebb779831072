"""Reads a trace back, a checked event at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tapeout.plugins.errors import UsageError
from tapeout.runtime.json_lines import (
    Field,
    Problems,
    field_problems,
    integer,
    numbered_lines,
    open_lines,
    parsed,
    text,
)
from tapeout.runtime.trace.writer import TRACE_FORMAT

_MOST = 2**62
_STEP = integer(0, _MOST)
_COUNT = integer(0, _MOST)


def _rows(fields: Mapping[str, Field], what: str) -> Field:
    def accepts(value: Any) -> bool:
        return isinstance(value, list) and not any(field_problems(v, fields, strict=False) for v in value)

    return Field(what, accepts, required=False)


_NAMED = {"id": text(), "reason": text()}
_CONTEXT = {**_NAMED, "start": _COUNT, "tokens": _COUNT}
_FIELDS: dict[str, dict[str, Field]] = {
    "start": {
        "format": Field(f"{TRACE_FORMAT}, the trace format of this version", lambda v: v == TRACE_FORMAT)
    },
    "arrived": {"id": text(), "step": _STEP, "prompt_tokens": _COUNT, "max_tokens": _COUNT},
    "finished": {"id": text(), "step": _STEP, "reason": text(), "output_tokens": _COUNT},
    "step": {
        "step": _STEP,
        "pages_used": _COUNT,
        "admitted": _rows(_NAMED, "a list of {id, reason}"),
        "paused": _rows(_NAMED, "a list of {id, reason}"),
        "evicted": _rows({**_NAMED, "pages": _COUNT}, "a list of {id, pages, reason}"),
        "left_out": _rows(_NAMED, "a list of {id, reason}"),
        "held": Field("{id, reason}", lambda v: not field_problems(v, _NAMED, strict=False), required=False),
        "context": _rows(_CONTEXT, "a list of {id, start, tokens, reason}"),
        "generation": Field(
            "a list of ids",
            lambda v: isinstance(v, list) and all(isinstance(i, str) for i in v),
            required=False,
        ),
    },
}
_HINT = "`tapeout run ENGINE --trace FILE` and `tapeout simulate WORKLOAD --trace FILE` write traces"


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a trace file, in order.

    Raises:
        UsageError: the file cannot be read, or a line is no event; it names the line.
    """
    with open_lines(path, "the trace") as stream:
        started = False
        for number, line in numbered_lines(stream):
            event = _checked(line, str(path), number, started)
            started = True
            yield event
    if not started:
        raise UsageError(
            f"{path} is empty, expected a trace: JSON lines, the first with event 'start'", hint=_HINT
        )


def _checked(line: bytes, name: str, number: int, started: bool) -> dict[str, Any]:
    problems = Problems(name, _HINT)
    try:
        event = parsed(line)
    except UsageError as error:
        problems.add(number, [error.message])
        problems.stop()
    kind = event.get("event") if isinstance(event, dict) else None
    if kind not in _FIELDS or (kind == "start") == started:
        expected = "'start' on the first line, then one of 'arrived', 'step', 'finished'"
        problems.add(number, [f"event = {kind!r}, expected {expected}"])
    else:
        problems.add(number, field_problems(event, _FIELDS[kind], strict=False))
    problems.stop()
    return event
