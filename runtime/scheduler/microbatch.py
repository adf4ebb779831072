"""The micro-batch scheduler: which rows run in the next step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tapeout.runtime.scheduler.request import Request


class Reason(StrEnum):
    """Why a running request got the rows it got."""

    LAST_CHUNK = "context: the rest of the prompt"
    CHUNK_BY_BUDGET = "context: a chunk, cut by max_num_tokens"
    CHUNK_BY_LIMIT = "context: a chunk, cut by chunk_tokens"
    GENERATION = "generation: one token"
    NO_BUDGET = "no rows: max_num_tokens is used up; it comes first in a later step"
    ALL_PLANNED = "no rows: its last token is being computed"


class Scheduled(NamedTuple):
    """Rows of one request: `num_tokens` tokens from position `start` on.

    `samples` is True where the last row's logits give an output token.
    """

    request_id: str
    slot: int
    start: int
    num_tokens: int
    samples: bool
    reason: Reason


class Skipped(NamedTuple):
    request_id: str
    reason: Reason


@dataclass(frozen=True)
class StepPlan:
    """What runs in one step: context rows first, then generation, and why.

    Together with the admissions of the step (see `capacity`) this explains every decision.
    """

    step: int
    context: tuple[Scheduled, ...]
    generation: tuple[Scheduled, ...]
    skipped: tuple[Skipped, ...]

    @property
    def scheduled(self) -> tuple[Scheduled, ...]:
        """All rows in packed order."""
        return self.context + self.generation

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.context) + len(self.generation)


class MicroBatchScheduler:
    """Fills `max_num_tokens`: generation first, the rest with context in order of admission.

    `chunk_tokens` caps the context tokens of one request in a step. A plan depends on the step's
    number and the running requests alone and costs time linear in their number. Every running
    request advances within a bounded number of steps: generation rows that do not all fit take turns
    by the step they last ran in, and while any context waits at least one row is kept for it (with a
    budget of one row, every other step).
    """

    def __init__(self, *, max_num_tokens: int, chunk_tokens: int | None = None) -> None:
        self.max_num_tokens = max_num_tokens
        self.chunk_tokens = chunk_tokens

    def plan(self, step: int, running: Iterable[Request]) -> StepPlan:
        """Plan step `step` over the running requests, given in order of admission."""
        context: list[Request] = []
        generation: list[Request] = []
        skipped: list[Skipped] = []
        for request in running:
            if request.cached_tokens < request.prompt_tokens:
                context.append(request)
            elif request.planned_tokens < request.max_tokens:
                generation.append(request)
            else:
                skipped.append(Skipped(request.request_id, Reason.ALL_PLANNED))

        room = self.max_num_tokens - self._reserved(step, context, generation)
        if len(generation) > room:
            turn = sorted(generation, key=lambda r: r.last_step)  # stable: ties by admission
            later = {r.request_id for r in turn[room:]}
            skipped += [Skipped(r.request_id, Reason.NO_BUDGET) for r in turn[room:]]
            generation = [r for r in generation if r.request_id not in later]
        rows = tuple(
            Scheduled(r.request_id, r.slot, r.cached_tokens, 1, True, Reason.GENERATION) for r in generation
        )
        chunks, left_out = self._fill(context, self.max_num_tokens - len(rows))
        return StepPlan(step, chunks, rows, tuple(skipped + left_out))

    def _reserved(self, step: int, context: list[Request], generation: list[Request]) -> int:
        """Rows kept for context although generation could take them."""
        if not context or len(generation) < self.max_num_tokens:
            return 0
        if self.max_num_tokens > 1:
            return 1
        # Not compared with generation's last step: who ran in the step before may be gone by now.
        return int(max(r.last_step for r in context) < step - 1)

    def _fill(self, context: list[Request], budget: int) -> tuple[tuple[Scheduled, ...], list[Skipped]]:
        chunks: list[Scheduled] = []
        left_out: list[Skipped] = []
        for request in context:
            if budget == 0:
                left_out.append(Skipped(request.request_id, Reason.NO_BUDGET))
                continue
            rest = request.prompt_tokens - request.cached_tokens
            size, reason = rest, Reason.LAST_CHUNK
            if self.chunk_tokens is not None and size > self.chunk_tokens:
                size, reason = self.chunk_tokens, Reason.CHUNK_BY_LIMIT
            if size > budget:
                size, reason = budget, Reason.CHUNK_BY_BUDGET
            chunks.append(
                Scheduled(request.request_id, request.slot, request.cached_tokens, size, size == rest, reason)
            )
            budget -= size
        return tuple(chunks), left_out
