"""Standard streams as they may be: closed, full, or of an encoding that lacks most characters."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from tapeout.plugins.errors import TapeoutError, UsageError


def prepare() -> None:
    """Make the process's streams safe to use; once, before anything is opened.

    A closed stream's number would go to the next file opened, and a library that writes its
    warnings to number 2 would write them into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # What the terminal's encoding lacks is shown as \\xNN, not refused after a long run.
            reconfigure(errors="backslashreplace")


def standard_output() -> IO[str]:
    """Where results go.

    Raises:
        UsageError: it is closed.
    """
    if sys.stdout is None or sys.stdout.closed:
        raise UsageError(
            "standard output is closed, so there is no place for the results",
            hint="leave out `>&-`, or redirect it to a file or /dev/null",
        )
    return sys.stdout


def read_standard_input() -> bytes:
    """All of standard input.

    Raises:
        UsageError: it is closed or cannot be read.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError(
            "standard input is closed, expected text or requests on it",
            hint="give --prompt TEXT or --input FILE, or leave out `<&-`",
        )
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"standard input cannot be read: {error.strerror or error}") from error


@contextmanager
def writing(name: str = "standard output") -> Iterator[None]:
    """Turns a failed write into an error that says where; a reader that has gone is left to click."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE and name == "standard output":
            raise
        raise TapeoutError(
            f"{name} cannot be written: {error.strerror or error}",
            hint="free space or write to another place; what is there now is not complete",
        ) from error


def flush() -> None:
    """Write what standard output still holds; TapeoutError when it takes no more."""
    if sys.stdout is not None and not sys.stdout.closed:
        with writing():
            sys.stdout.flush()


def discard_unwritten() -> None:
    """After a failed write: what cannot be written is dropped, or the interpreter's end would fail too."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


def is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
