"""What one turn of the loop decided: the record behind `on_step`, traces and `tapeout explain`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tapeout.runtime.scheduler.capacity import Admission, Held
from tapeout.runtime.scheduler.plan import StepPlan


class PauseCause(StrEnum):
    PAGES = "kv_cache_pages"  #: MAX_UTILIZATION: the pool has too few for everybody
    WEIGHTS = "weights"  #: other weights are loaded, by which its pages have to be computed again


@dataclass(frozen=True)
class Pause:
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
class StepRecord:
    """Who was admitted, resumed, paused and held back, and what the step runs.

    Attributes:
        held: why the first of the queue waits; those behind it wait for their turn. None when nobody
            waits or nothing keeps the first one.
        num_waiting: requests that wait for a slot once this was decided, paused ones among them.
        pages_used: pages in use before the step's own.
    """

    admitted: tuple[Admission, ...]
    held: Held | None
    paused: tuple[Pause, ...]
    plan: StepPlan
    num_waiting: int = 0
    pages_used: int = 0

    def explain(self) -> list[str]:
        """The decisions, a line each."""
        lines = [f"{a.request_id}: {a.reason()}" for a in self.admitted]
        lines += [f"{p.request_id}: {p.reason()}" for p in self.paused]
        if self.held is not None:
            lines.append(f"{self.held.request_id}: {self.held.reason()}")
        lines += [
            f"{s.request_id}: {s.reason.value}: {s.num_tokens} from position {s.start}"
            for s in self.plan.scheduled
        ]
        lines += [f"{s.request_id}: {s.reason.value}" for s in self.plan.skipped]
        return lines
