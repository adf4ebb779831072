"""The error that says line by line where memory would go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapeout.plugins.errors import CapacityError


@dataclass(frozen=True)
class BudgetLine:
    """One use of memory; `lower` says which limit shrinks it. Mapped files are shown but not
    counted, since the system can drop their pages at any time."""

    name: str
    size_bytes: int
    lower: str
    counted: bool = True


def check_budget(what: str, lines: Sequence[BudgetLine], available_bytes: int) -> None:
    """Raise CapacityError, with every line, when the counted lines exceed what is available."""
    needed = sum(line.size_bytes for line in lines if line.counted)
    if needed > available_bytes:
        raise budget_error(what, lines, available_bytes)


def budget_error(what: str, lines: Sequence[BudgetLine], available_bytes: int) -> CapacityError:
    """The error itself, for an allocation that failed although the sum looked right."""
    needed = sum(line.size_bytes for line in lines if line.counted)
    rows = [
        f"  {line.name:<34} {_mib(line.size_bytes):>14}  {line.lower}"
        + ("" if line.counted else " (not counted)")
        for line in lines
    ]
    largest = max((line for line in lines if line.counted), key=lambda line: line.size_bytes)
    return CapacityError(
        f"not enough memory for {what}: it needs {_mib(needed)}, "
        f"{_mib(available_bytes)} are available\n" + "\n".join(rows),
        hint=f"the largest part is {largest.name}: {largest.lower}",
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
