"""The micro-batch scheduler: which rows run in the next step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tapeout.runtime.scheduler.running import Running

_UNLIMITED = np.iinfo(np.int32).max


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


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What runs in one step: context rows first, then generation, and why.

    Together with the admissions of the step (see `capacity`) this explains every decision. B sequences;
    the numbers are arrays, and what names requests one by one is made when somebody asks.

    Attributes:
        request_ids, slots: [B] whose rows they are.
        starts, ends: [B] positions of its rows. samples: [B] whether the last row's logits give an
            output token.
        context_reasons: of the first sequences; the others generate.
        left_out: ids of running requests without rows, by reason.
    """

    step: int
    request_ids: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    samples: np.ndarray
    context_reasons: tuple[Reason, ...]
    left_out: tuple[tuple[Reason, np.ndarray], ...]

    @property
    def num_sequences(self) -> int:
        return len(self.slots)

    @property
    def num_context(self) -> int:
        """Context sequences, which stand before the others."""
        return len(self.context_reasons)

    @property
    def sizes(self) -> np.ndarray:
        """[B] rows of each sequence."""
        return self.ends - self.starts

    @property
    def num_tokens(self) -> int:
        return int(self.sizes.sum())

    @property
    def sampled_slots(self) -> np.ndarray:
        """[R] slots of the rows that give an output token, in packed order."""
        # Generation always samples; so does all context but cut prompts.
        return self.slots if not self.context_reasons else self.slots[self.samples]

    @cached_property
    def scheduled(self) -> tuple[Scheduled, ...]:
        """All sequences in packed order."""
        columns = (self.request_ids, self.slots, self.starts, self.sizes, self.samples)
        generation = (Reason.GENERATION,) * (self.num_sequences - self.num_context)
        rows = zip(*(c.tolist() for c in columns), self.context_reasons + generation, strict=True)
        return tuple(Scheduled(*row) for row in rows)

    @property
    def context(self) -> tuple[Scheduled, ...]:
        return self.scheduled[: self.num_context]

    @property
    def generation(self) -> tuple[Scheduled, ...]:
        return self.scheduled[self.num_context :]

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return tuple(Skipped(name, reason) for reason, names in self.left_out for name in names.tolist())


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
        # More than any prompt has stands for no limit.
        self._most_tokens = min(chunk_tokens or _UNLIMITED, _UNLIMITED)

    def plan(self, step: int, running: Running) -> StepPlan:
        """Plan step `step` over the running requests."""
        slots = running.order
        starts = running.cached_tokens[slots]
        wants_context = starts < running.prompt_tokens[slots]
        wants_tokens = running.planned_tokens[slots] < running.max_tokens[slots]
        context, generation = slots[:0], slots
        left_out: list[tuple[Reason, np.ndarray]] = []
        if wants_context.any():
            context = slots[wants_context]
            generation, wants_tokens = slots[~wants_context], wants_tokens[~wants_context]
        if not wants_tokens.all():
            left_out.append((Reason.ALL_PLANNED, generation[~wants_tokens]))
            generation = generation[wants_tokens]

        room = self.max_num_tokens - self._reserved(step, running, context, generation)
        if len(generation) > room:
            turn = np.argsort(running.last_step[generation], kind="stable")  # ties by admission
            left_out.append((Reason.NO_BUDGET, generation[turn[room:]]))
            generation = generation[np.sort(turn[:room])]
        if len(context) == 0:
            return _step_plan(step, running, generation, 1, (), left_out)
        sizes, reasons = self._fill(running, context, self.max_num_tokens - len(generation))
        served = len(sizes)
        if served < len(context):
            left_out.append((Reason.NO_BUDGET, context[served:]))
        slots = np.concatenate([context[:served], generation])
        sizes = np.concatenate([sizes, np.ones(len(generation), np.int32)])
        return _step_plan(step, running, slots, sizes, reasons, left_out)

    def _reserved(self, step: int, running: Running, context: np.ndarray, generation: np.ndarray) -> int:
        """Rows kept for context although generation could take them."""
        if len(context) == 0 or len(generation) < self.max_num_tokens:
            return 0
        if self.max_num_tokens > 1:
            return 1
        # Not compared with generation's last step: who ran in the step before may be gone by now.
        return int(running.last_step[context].max() < step - 1)

    def _fill(
        self, running: Running, context: np.ndarray, budget: int
    ) -> tuple[np.ndarray, tuple[Reason, ...]]:
        """Tokens for the first of the context requests, as many as get any, and why."""
        rest = running.prompt_tokens[context] - running.cached_tokens[context]
        wanted = np.minimum(rest, self._most_tokens)
        before = np.cumsum(wanted, dtype=np.int32) - wanted
        served = int(np.searchsorted(before, budget))
        sizes = np.minimum(wanted, budget - before)[:served]
        whole, uncut = sizes == rest[:served], sizes == wanted[:served]
        reasons = tuple(
            Reason.LAST_CHUNK if w else Reason.CHUNK_BY_LIMIT if u else Reason.CHUNK_BY_BUDGET
            for w, u in zip(whole.tolist(), uncut.tolist(), strict=True)
        )
        return sizes, reasons


def _step_plan(
    step: int,
    running: Running,
    slots: np.ndarray,
    sizes: np.ndarray | int,
    reasons: tuple[Reason, ...],
    left_out: list[tuple[Reason, np.ndarray]],
) -> StepPlan:
    starts = running.cached_tokens[slots]
    samples = np.ones(len(slots), bool)
    samples[: len(reasons)] = [reason is Reason.LAST_CHUNK for reason in reasons]
    names = running.request_ids
    return StepPlan(
        step=step,
        request_ids=names[slots],
        slots=slots,
        starts=starts,
        ends=starts + sizes,
        samples=samples,
        context_reasons=reasons,
        left_out=tuple((reason, names[left]) for reason, left in left_out),
    )
