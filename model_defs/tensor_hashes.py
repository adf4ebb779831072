"""SHA-256 of a checkpoint's tensors: in threads, beside other work, or of what is read anyway."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tapeout.model_defs.safetensors_file import read_range
from tapeout.plugins.errors import UsageError

MAX_THREADS = 8
#: Between two chunks a thread waits for the interpreter, up to 5 ms each time while another computes.
CHUNK_BYTES = 32 << 20

#: Name, path, first byte, number of bytes.
Part = tuple[str, Path, int, int]


class TensorHashes:
    """SHA-256 (hex) of tensors by name: hashed when asked for, from the beginning of `ahead`, or of what is
    read within `while_reading`.

    Attributes:
        see_reads: whether who reads a tensor hands its bytes to `read`, as they are in the file.
    """

    def __init__(self, parts: Iterable[Part], *, see_reads: bool = False) -> None:
        self.see_reads = see_reads
        self._parts = sorted(parts)
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._begun: dict[str, Future[str]] | None = None
        self._seen: dict[str, str] | None = None  # of what was read, while that is wanted

    def result(self) -> dict[str, str]:
        """All of them; UsageError, which names the tensor, when one cannot be read."""
        return {name: future.result() for name, future in self._begin().items()}

    @contextlib.contextmanager
    def while_reading(self) -> Iterator[None]:
        """Hash what is read within, by whom it is read; the rest is hashed at the end."""
        self._seen = {}
        try:
            yield
            self._begin()
        finally:
            self._seen = None

    def read(self, name: str, data: memoryview) -> None:
        """A whole tensor's bytes, as somebody has read them; any thread may call."""
        if (seen := self._seen) is not None and name not in seen and self._begun is None:
            seen[name] = hashlib.sha256(data).hexdigest()

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Hash beside what runs within; what is not done at its end is given up."""
        self._begin()
        with self.giving_up():
            yield

    @contextlib.contextmanager
    def giving_up(self) -> Iterator[None]:
        """Give up at its end what is not done."""
        try:
            yield
        finally:
            self._give_up()

    def _begin(self) -> dict[str, Future[str]]:
        with self._lock:
            if self._begun is None:
                self._stopped = threading.Event()
                pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "tapeout-hash")
                seen = self._seen or {}
                self._begun = {
                    part[0]: _known(seen[part[0]])
                    if part[0] in seen
                    else pool.submit(_hash, part, self._stopped)
                    for part in self._parts
                }
                pool.shutdown(wait=False)  # takes no more, and goes when it is done
            return self._begun

    def _give_up(self) -> None:
        with self._lock:
            if self._begun is not None and not all(f.done() for f in self._begun.values()):
                self._stopped.set()  # a process does not wait for gigabytes at its end
                for future in self._begun.values():
                    future.cancel()
                self._begun = None


def _known(digest: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(digest)
    return future


class _GivenUp(Exception):
    """Nobody waits for this tensor any more."""


def _hash(part: Part, stopped: threading.Event) -> str:
    name, path, start, nbytes = part
    digest = hashlib.sha256()  # leaves the interpreter lock, as reading does
    try:
        for chunk in read_range(path, start, nbytes, CHUNK_BYTES):
            if stopped.is_set():
                raise _GivenUp
            digest.update(chunk)
    except (OSError, EOFError) as error:
        raise unreadable(name, error) from error
    return digest.hexdigest()


def unreadable(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"tensor {name!r} cannot be read: {error}",
        hint="the checkpoint changed after it was opened; run the command again",
    )
