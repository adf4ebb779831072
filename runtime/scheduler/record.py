"""What one turn of the loop decided: the record behind `on_step`, traces and `tapeout explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tapeout.runtime.kv_cache.users import PageEvictions
from tapeout.runtime.scheduler.capacity import Admission, Held
from tapeout.runtime.scheduler.plan import StepPlan

_SHOWN_NAMES = 5


class PauseCause(StrEnum):
    PAGES = "kv_cache_pages"  #: MAX_UTILIZATION: the pool has too few for everybody
    WEIGHTS = "weights"  #: other weights are loaded, by which its pages have to be computed again


class Pause(NamedTuple):
    """A running request lost its slot, and waits to run again.

    Attributes:
        pages: what it gives back, once the step it is part of has been read.
        short_pages: what the step lacked for all its rows; 0 where pages are not the cause.
        output_tokens: planned so far; they become context when it runs again.
    """

    request_id: str
    cause: PauseCause
    pages: int
    short_pages: int
    output_tokens: int

    def reason(self) -> str:
        if self.cause is PauseCause.WEIGHTS:
            return (
                f"paused: the engine gets other weights, by which its {self.pages} pages are computed again "
                f"after {self.output_tokens} output tokens"
            )
        return (
            f"paused: the step lacks {self.short_pages} pages and this is the newest request; it gives back "
            f"{self.pages} after {self.output_tokens} output tokens"
        )


@dataclass(frozen=True)
class Eviction:
    """Pages that a request had left to the prefix cache, and that nobody held, made room on the device.

    Attributes:
        request_id: who had computed them. pages: how many.
        to_host: as many of them went to the host tier; the others are lost.
        made_room_for: ids of those that got pages at that time, with which the blank ones did not suffice.
    """

    request_id: str
    pages: int
    to_host: int
    made_room_for: tuple[str, ...]

    def reason(self) -> str:
        names = ", ".join(self.made_room_for[:_SHOWN_NAMES]) or "a pinned prefix"
        if (more := len(self.made_room_for) - _SHOWN_NAMES) > 0:
            names += f" and {more} more"
        where = f", {self.to_host} of them to the host," if self.to_host else ""
        return f"evicted: {self.pages} cached pages of it{where} made room for {names}"


def evictions_of(evicted: Iterable[PageEvictions], names: Sequence[str]) -> tuple[Eviction, ...]:
    """One for each request that lost pages at a time. names: request ids by slot."""
    found = []
    for pages, slots in evicted:
        lost = Counter(owner for owner, _ in pages)
        moved = Counter(owner for owner, on_host in pages if on_host)
        for_whom = tuple(names[slot] for slot in slots)
        found += [Eviction(owner, count, moved[owner], for_whom) for owner, count in lost.items()]
    return tuple(found)


@dataclass(frozen=True)
class StepRecord:
    """Who was admitted, resumed, paused and held back, and what the step runs.

    Attributes:
        held: why the first of the queue waits; those behind it wait for their turn. None when nobody
            waits or nothing keeps the first one.
        num_waiting: requests that wait for a slot once this was decided, paused ones among them.
        pages_used: pages in use before the step's own.
        evicted: whose cached pages made room for admissions and for the step's own pages.
    """

    admitted: tuple[Admission, ...]
    held: Held | None
    paused: tuple[Pause, ...]
    plan: StepPlan
    num_waiting: int = 0
    pages_used: int = 0
    evicted: tuple[Eviction, ...] = ()

    def explain(self) -> list[str]:
        """The decisions, a line each."""
        lines = [f"{a.request_id}: {a.reason()}" for a in self.admitted]
        lines += [f"{p.request_id}: {p.reason()}" for p in self.paused]
        lines += [f"{e.request_id}: {e.reason()}" for e in self.evicted]
        if self.held is not None:
            lines.append(f"{self.held.request_id}: {self.held.reason()}")
        lines += [
            f"{s.request_id}: {s.reason.value}: {s.num_tokens} from position {s.start}"
            for s in self.plan.scheduled
        ]
        lines += [f"{s.request_id}: {s.reason.value}" for s in self.plan.skipped]
        return lines
