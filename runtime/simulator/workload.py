"""A workload file: when requests arrive and how long they are, a JSON line each.

    {"id": "R1", "arrival_step": 0, "prompt_tokens": 16, "max_tokens": 4, "priority": 0}

The whole file is checked before anything runs, and read again while it runs: of a file of any length only
eight bytes a line are kept, to find ids given twice. Only a file whose arrivals are not in order is read into
memory, and sorted.
"""

from __future__ import annotations

import shutil
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np

from tapeout.plugins.errors import UsageError
from tapeout.runtime.json_lines import (
    Problems,
    field_problems,
    integer,
    numbered_lines,
    open_lines,
    parsed,
    text,
)
from tapeout.runtime.scheduler.policies import MAX_PRIORITY

MAX_STEP = 10**12
MAX_TOKENS = 2**30

_FIELDS = {
    "id": text(),
    "arrival_step": integer(0, MAX_STEP),
    "prompt_tokens": integer(1, MAX_TOKENS),
    "max_tokens": integer(1, MAX_TOKENS),
    "priority": integer(-MAX_PRIORITY, MAX_PRIORITY, required=False),
}
_HINT = (
    'a line is {"id": "R1", "arrival_step": 0, "prompt_tokens": 16, "max_tokens": 4}, '
    'with "priority" if wanted'
)


class Arrival(NamedTuple):
    """A request of a workload; it generates exactly `max_tokens` tokens."""

    id: str
    arrival_step: int
    prompt_tokens: int
    max_tokens: int
    priority: int = 0


class Workload:
    """The checked requests of a file, in order of arrival; those of one step in the order of their lines.

    Use it as a context manager: what cannot be read twice, such as a pipe, is kept in a temporary file.

    Attributes:
        num_requests: how many there are.
        longest_tokens: prompt and output of the longest one.

    Raises:
        UsageError: the file cannot be read or lines are bad; all of them, up to a screenful, are named.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = _rereadable(path)
        self.num_requests = self.longest_tokens = 0
        self._in_order = True
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Arrival]:
        if self._in_order:
            return self._arrivals()
        return iter(sorted(self._arrivals(), key=lambda arrival: arrival.arrival_step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()

    def _arrivals(self) -> Iterator[Arrival]:
        self._stream.seek(0)
        for _, line in numbered_lines(self._stream):
            yield Arrival(**parsed(line))

    def _check(self) -> None:
        problems, hashes, last = Problems(str(self._path), _HINT), array("q"), 0
        for number, line in numbered_lines(self._stream):
            try:
                data = parsed(line)
            except UsageError as error:
                problems.add(number, [error.message])
                continue
            if found := field_problems(data, _FIELDS):
                problems.add(number, found)
                continue
            hashes.append(hash(data["id"]))
            self._in_order &= data["arrival_step"] >= last
            last = data["arrival_step"]
            self.longest_tokens = max(self.longest_tokens, data["prompt_tokens"] + data["max_tokens"])
        problems.stop()
        if not hashes:
            raise UsageError(f"{self._path} holds no requests, expected a JSON line for each", hint=_HINT)
        self.num_requests = len(hashes)
        self._check_ids(np.sort(np.frombuffer(hashes, np.int64)), problems)

    def _check_ids(self, hashes: np.ndarray, problems: Problems) -> None:
        twice = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
        if not twice:
            return
        seen: dict[Any, int] = {}
        self._stream.seek(0)
        for number, line in numbered_lines(self._stream):
            name = parsed(line)["id"]
            if hash(name) in twice:
                if name in seen:
                    problems.add(number, [f"id = {name!r}, expected another one: line {seen[name]} has it"])
                seen.setdefault(name, number)
        problems.stop()


def _rereadable(path: Path) -> IO[bytes]:
    stream = open_lines(path, "the workload")
    try:
        if path.is_file():
            return stream
        copy = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the workload)
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
    except OSError as error:
        stream.close()
        raise UsageError(f"the workload {str(path)!r} cannot be read: {error.strerror or error}") from None
    stream.close()
    return copy
