"""Files that some process reads are locked, shared, so that who clears a cache can tell."""

from __future__ import annotations

import contextlib
import fcntl


def mark_in_use(fd: int) -> None:
    """Share-lock an open file until it is closed.

    Nothing waits for this lock: file systems without locks, and files whose writer still holds its own,
    go without.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def lock_unused(fd: int) -> bool:
    """Take the lock for oneself, at once, until the file is closed; False when somebody uses the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
