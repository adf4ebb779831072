"""What can be seen of the loop from outside: its counts, and its decisions as they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tapeout.runtime.scheduler.record import StepRecord
from tapeout.runtime.scheduler.request import Request


@dataclass(kw_only=True)
class LoopCounts:
    """Counts since the start.

    `prompt_tokens` are context tokens computed; `recomputed_tokens` those among them that had been
    computed before their request was paused.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    pauses: int = 0
    surplus_rows: int = 0
    failed_steps: int = 0
    requests_finished: int = 0


@dataclass(kw_only=True)
class LoopStats(LoopCounts):
    """The counts, and what holds now. Paused requests count as waiting."""

    num_requests_running: int
    num_requests_waiting: int
    kv_pages_used: int
    kv_pages_total: int


class Observer(Protocol):
    """Follows what the loop decides, such as a trace. Called in order; must not call the loop."""

    def on_arrival(self, request: Request, step: int) -> None:
        """A request was queued before step `step` was planned."""

    def on_step(self, record: StepRecord) -> None:
        """A step was planned."""

    def on_finish(self, request: Request, step: int, output_tokens: int) -> None:
        """A request ended with this many tokens; `step` computed the last of them, or was the next one
        to be planned where none did."""
