"""What can be seen of the loop from outside: its counts, and its decisions as they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tapeout.runtime.scheduler.record import StepRecord
from tapeout.runtime.scheduler.request import Request


@dataclass(frozen=True)
class LoopStats:
    """Counts since the start, and what holds now.

    `prompt_tokens` are context tokens computed; `recomputed_tokens` those among them that had been
    computed before their request was paused. Paused requests count as waiting.
    """

    steps: int
    prompt_tokens: int
    generation_tokens: int
    recomputed_tokens: int
    pauses: int
    surplus_rows: int
    failed_steps: int
    requests_finished: int
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
