"""What build processes share of the machine: quiet while something is timed, and memory."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Machine:
    """Lets any number of processes work at once, or one of them alone.

    A lock ends with its process, so that one that is killed holds up nobody.
    """

    def __init__(self, lock: Path) -> None:
        self._file = lock.open("a")
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process works, and keep it so."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def close(self) -> None:
        self._file.close()


def available_bytes() -> int:
    """Memory that is free to take: of the machine, or of the container if that has less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    facts = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    free = facts["MemAvailable"]
    limit, used = _read_number("memory.max"), _read_number("memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _read_number(name: str) -> int | None:
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
