"""Which tactics may run a signature, and why the others may not: one rule for every target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class _Tactic(Protocol):
    name: str
    batch_invariant: bool


T = TypeVar("T", bound=_Tactic)


def split_usable(
    tactics: Iterable[T], unsupported: Callable[[T], str | None], batch_invariant: bool
) -> tuple[list[T], dict[str, str]]:
    """Usable tactics in their order, and reasons by name for the rest.

    Args:
        unsupported: why a tactic cannot run the signature on the target; None when it can.
        batch_invariant: refuse those whose result for a row depends on the other rows.
    """
    usable, reasons = [], {}
    for tactic in tactics:
        reason = unsupported(tactic)
        if reason is None and batch_invariant and not tactic.batch_invariant:
            reason = "its result for a row depends on the other rows"
        if reason is None:
            usable.append(tactic)
        else:
            reasons[tactic.name] = reason
    return usable, reasons
