"""Files of JSON lines that users write or hand over: every line checked, every fault told with its place."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import shown

_MOST_PROBLEMS = 20


@dataclass(frozen=True)
class Field:
    """What a field must hold: `accepts` says whether a value does, `expected` in words what would."""

    expected: str
    accepts: Callable[[Any], bool]
    required: bool = True


def integer(low: int, high: int, *, required: bool = True) -> Field:
    return Field(
        f"an integer from {low:,} to {high:,}", lambda v: type(v) is int and low <= v <= high, required
    )


def text(*, required: bool = True) -> Field:
    return Field("text that is not empty", lambda v: isinstance(v, str) and v != "", required)


class Problems:
    """Faults of one file, gathered so that a user sees them together.

    Raises UsageError from `stop` when there are any; `add` does so once there are many.
    """

    def __init__(self, name: str, hint: str) -> None:
        self._name, self._hint = name, hint
        self._lines: list[str] = []

    def add(self, number: int, problems: list[str]) -> None:
        self._lines += [f"{self._name}:{number}: {problem}" for problem in problems]
        if len(self._lines) >= _MOST_PROBLEMS:
            self._lines[_MOST_PROBLEMS:] = ["there may be more after these"]
            self.stop()

    def stop(self) -> None:
        if self._lines:
            raise UsageError("\n".join(self._lines), hint=self._hint)


def numbered_lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers."""
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            yield number, line


def open_lines(path: Path, what: str) -> IO[bytes]:
    """The file, opened; UsageError when that cannot be."""
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{what} {str(path)!r} cannot be read: {reason}", hint="give a file of JSON lines"
        ) from None


def parsed(line: bytes) -> Any:
    """The line's JSON; UsageError for what is none."""
    try:
        return _DECODER.decode(line.decode("utf-8", "surrogatepass").removeprefix(_BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"not JSON: {error.msg} at column {error.colno}: {shown(line[:40].decode(errors='replace'))}"
        ) from None
    except RecursionError:
        raise UsageError("not read: it nests too many lists and objects") from None
    except ValueError:  # Python's own limit, which bounds the time
        raise UsageError(
            f"not read: it holds an integer of more than {sys.get_int_max_str_digits()} digits"
        ) from None


def field_problems(data: Any, fields: Mapping[str, Field], *, strict: bool = True) -> list[str]:
    """What is wrong with an object's fields; `strict` refuses those that are not known."""
    if not isinstance(data, dict):
        return [f"{shown(data)} is no object, expected {{{', '.join(fields)}}}"]
    problems = [
        f"{name} is missing, expected {field.expected}"
        for name, field in fields.items()
        if field.required and name not in data
    ]
    for name, value in data.items():
        if name not in fields:
            if strict:
                close = difflib.get_close_matches(name, fields, n=1)
                problems.append(
                    f"unknown field {name!r}" + (f", did you mean {close[0]!r}?" if close else "")
                )
        elif not fields[name].accepts(value):
            problems.append(f"{name} = {shown(value)}, expected {fields[name].expected}")
    return problems


def _no_constant(name: str) -> NoReturn:
    raise UsageError(f"not JSON: {name} is no JSON value, expected a finite number")


# Made once: `json.loads` with an option of its own makes one for every line.
_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_BYTE_ORDER_MARK = "\ufeff"
