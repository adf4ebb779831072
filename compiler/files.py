"""Files that appear whole or not at all, and paths that are proven usable before any work is done."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from tapeout.plugins.errors import UsageError


def check_output(path: str | Path, what: str = "output") -> Path:
    """The file that writing to `path` will replace: `path`, or what it links to, proven writable.

    `what` is how a message calls it. Raises UsageError: a directory, a device, pipe or socket
    (renaming would replace it), a loop of links, or a place that takes no new file.
    """
    path = Path(path)
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        # Looked at without following: what realpath leaves a link is part of a loop.
        if target.is_symlink() or (target.exists() and not target.is_dir() and not target.is_file()):
            raise UsageError(
                f"{what} {path} is not a regular file", hint="name a file that may be written or replaced"
            )
        if target.is_dir():
            raise UsageError(f"{what} {path} is a directory", hint=f"name a file in it: {path / 'NAME'}")
        if not target.parent.is_dir():
            raise UsageError(
                f"{what} directory {target.parent} does not exist", hint=f"mkdir -p {target.parent}"
            )
        with temporary_file(target):
            pass
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        raise UsageError(
            f"{what} {path} cannot be written: {getattr(error, 'strerror', None) or error}",
            hint="choose a directory you may write to",
        ) from None
    return target


def check_directory(path: Path, what: str) -> None:
    """Raise UsageError unless `path` is, or can become, a directory that takes new files."""
    try:
        there = next(p for p in (path.absolute(), *path.absolute().parents) if os.path.lexists(p))
        if not there.is_dir():
            raise UsageError(f"{what} {path}: {there} is not a directory", hint="name another directory")
        with tempfile.TemporaryFile(dir=there):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{what} {path} cannot be written: {getattr(error, 'strerror', None) or error}",
            hint="choose a directory you may write to",
        ) from None


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """A new locked file beside `path`; removed on the way out, whatever happens, unless renamed.

    The lock tells a later build that the writer is alive; it ends with the process.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        with os.fdopen(fd, "wb") as file:
            _lock(fd)
            yield temporary, file
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole small file; `path` (or what it links to) holds the old or the new text."""
    path = check_output(path)
    with temporary_file(path) as (temporary, file):
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(path)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of writers of `path` that were killed; a `*` in its name is a wildcard."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError), leftover.open("r+b") as file:
            if _lock(file.fileno()):
                leftover.unlink()


def _lock(fd: int) -> bool:
    """Take the lock at once or say that another process holds it (or that there are no locks here)."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back, for a step that must be done whole; they arrive on the way out.

    Handlers run in the main thread only, so there is nothing to do in another.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, _: FrameType | None) -> None:
        held.append(number)

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    ours = {n: handler for n, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in ours:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        for waiting in held:
            signal.raise_signal(waiting)


def sync_directory(directory: Path) -> None:
    """Make a rename durable; some file systems cannot sync a directory, which loses only durability."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
