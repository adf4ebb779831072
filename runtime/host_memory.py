"""How much memory this process may still take on the host."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62


def available_host_bytes() -> int:
    """The smaller of the kernel's MemAvailable and what the process's cgroups have left.

    Page cache counts as available. Without /proc (not Linux) it is the physical memory.
    """
    return min(_mem_available(), _cgroup_left())


def _mem_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_left() -> int:
    """Bytes left in the tightest cgroup (v2, or v1's memory controller)."""
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return _UNLIMITED
    left = _UNLIMITED
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            root, names = _CGROUP, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUP / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may not exist below the mount: walk up to what does.
        group = root / path.lstrip("/")
        while True:
            left = min(left, _group_left(group, *names))
            if group == root or root not in group.parents:
                break
            group = group.parent
    return left


def _group_left(group: Path, limit_file: str, usage_file: str, cache_key: str) -> int:
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            return _UNLIMITED
        used = int((group / usage_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(int(limit) - used + int(stat.get(cache_key, 0)), 0)
    except (OSError, ValueError):
        return _UNLIMITED
