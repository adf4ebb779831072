"""How much memory there is, and the error that says line by line where it would go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.plugins.errors import CapacityError


@dataclass(frozen=True)
class BudgetLine:
    """One use of memory; `lower` says which limit shrinks it. Mapped files are shown but not
    counted, since the system can drop their pages at any time."""

    name: str
    size_bytes: int
    lower: str
    counted: bool = True


def available_host_bytes() -> int | None:
    """Memory this process can still take: the system's, or its control group's where that is less.

    None where the system does not say.
    """
    limits = [b for b in (_meminfo_available(), _cgroup_available()) if b is not None]
    return min(limits) if limits else None


def check_budget(what: str, lines: Sequence[BudgetLine], available_bytes: int | None) -> None:
    """Raise CapacityError, with every line, when the counted lines exceed what is available."""
    needed = sum(line.size_bytes for line in lines if line.counted)
    if available_bytes is not None and needed > available_bytes:
        raise budget_error(what, lines, available_bytes)


def budget_error(what: str, lines: Sequence[BudgetLine], available_bytes: int | None) -> CapacityError:
    """The error itself, for an allocation that failed although the sum looked right."""
    needed = sum(line.size_bytes for line in lines if line.counted)
    have = "" if available_bytes is None else f", {_mib(available_bytes)} are available"
    rows = [
        f"  {line.name:<34} {_mib(line.size_bytes):>14}  {'' if line.counted else '(not counted) '}{line.lower}"
        for line in lines
    ]
    largest = max((line for line in lines if line.counted), key=lambda line: line.size_bytes)
    return CapacityError(
        f"not enough memory for {what}: it needs {_mib(needed)}{have}\n" + "\n".join(rows),
        hint=f"the largest part is {largest.name}: {largest.lower}",
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_available() -> int | None:
    """Limit minus use of this control group (version 2, as containers see it), file pages counted as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)))
    except (OSError, ValueError):
        return None
