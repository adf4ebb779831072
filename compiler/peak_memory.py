"""The most memory this process has held at once."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int:
    """Peak resident memory of this process in bytes, since its program began.

    Where there is no /proc it is what `getrusage` says, which counts for more: `ru_maxrss` outlives
    `exec`, so that a process begins with the peak of the one that started it.
    """
    try:
        status = _STATUS.read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (high_water,) = (line.split() for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(high_water[1]) * 1024
