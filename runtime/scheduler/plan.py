"""What runs in one step, and why: the frozen `StepPlan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Reason(StrEnum):
    """Why a running request got the rows it got."""

    LAST_CHUNK = "context: the rest of it"
    CHUNK_BY_BUDGET = "context: a chunk, cut by max_num_tokens"
    CHUNK_BY_LIMIT = "context: a chunk, cut by chunk_tokens"
    CHUNK_EQUAL = "context: a chunk, as many pages as the others get"
    CHUNK_FORCED = "context: a chunk of the forced size"
    GENERATION = "generation: one token"
    NO_BUDGET = "no rows: max_num_tokens is used up; it comes first in a later step"
    NO_PAGES = "no rows: its next tokens need pages that are still on their way back to the pool"
    ALL_PLANNED = "no rows: its last token is being computed"


#: Reasons of context rows; a plan's array of reasons holds indices into this.
CONTEXT_REASONS = (
    Reason.LAST_CHUNK,
    Reason.CHUNK_BY_BUDGET,
    Reason.CHUNK_BY_LIMIT,
    Reason.CHUNK_EQUAL,
    Reason.CHUNK_FORCED,
)
LAST_CHUNK = 0
_NO_SLOTS = np.zeros(0, np.int64)


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
        slots: [B] whose rows they are. names: request ids by slot, which nobody changes any more.
        starts, ends: [B] positions of its rows. samples: [B] whether the last row's logits give an
            output token.
        context_codes: [C] why the first C sequences, which are context, got their rows: indices into
            CONTEXT_REASONS. The others generate.
        left_out: slots of running requests without rows, by reason.
    """

    step: int
    names: Sequence[str]
    slots: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    samples: np.ndarray
    context_codes: np.ndarray
    left_out: tuple[tuple[Reason, np.ndarray], ...]

    @property
    def request_ids(self) -> list[str]:
        """[B]: whose rows they are."""
        return self.names_of(self.slots)

    @property
    def num_sequences(self) -> int:
        return len(self.slots)

    @property
    def num_context(self) -> int:
        """Context sequences, which stand before the others."""
        return len(self.context_codes)

    @property
    def sizes(self) -> np.ndarray:
        """[B] rows of each sequence."""
        return self.ends - self.starts

    @property
    def num_tokens(self) -> int:
        count = len(self.slots)
        return self.context_rows + count - self.num_context if len(self.context_codes) else count

    @property
    def context_rows(self) -> int:
        """Rows of context: generation has one a sequence."""
        count = self.num_context
        return int(np.add.reduce(self.ends[:count] - self.starts[:count])) if count else 0

    @property
    def sampled_slots(self) -> np.ndarray:
        """[R] slots of the rows that give an output token, in packed order."""
        # Generation always samples; so does all context but cut prompts.
        return self.slots[self.samples] if len(self.context_codes) else self.slots

    @cached_property
    def scheduled(self) -> tuple[Scheduled, ...]:
        """All sequences in packed order."""
        return self.context + self._rows(slice(self.num_context, None))

    @cached_property
    def context(self) -> tuple[Scheduled, ...]:
        """Those in context, which are few even where many generate."""
        return self._rows(slice(0, self.num_context))

    @property
    def generation(self) -> tuple[Scheduled, ...]:
        return self.scheduled[self.num_context :]

    def _rows(self, part: slice) -> tuple[Scheduled, ...]:
        reasons = [CONTEXT_REASONS[code] for code in self.context_codes.tolist()]
        reasons += [Reason.GENERATION] * (self.num_sequences - self.num_context)
        slots, starts = self.slots[part], self.starts[part]
        columns = (slots, starts, self.ends[part] - starts, self.samples[part])
        rows = zip(self.names_of(slots), *(c.tolist() for c in columns), reasons[part], strict=True)
        return tuple(Scheduled(*row) for row in rows)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return tuple(
            Skipped(name, reason) for reason, slots in self.left_out for name in self.names_of(slots)
        )

    def names_of(self, slots: np.ndarray) -> list[str]:
        """Request ids of these slots."""
        names = self.names
        return [names[slot] for slot in slots.tolist()]

    def slots_left_out(self, reason: Reason) -> np.ndarray:
        """int64: slots of those without rows for this reason."""
        return next((slots for why, slots in self.left_out if why is reason), _NO_SLOTS)

    def only(self, rows: np.ndarray, left_out: tuple[tuple[Reason, np.ndarray], ...]) -> StepPlan:
        """The plan with these rows alone, and with another `left_out`; rows: int64, ascending."""
        codes = self.context_codes
        return StepPlan(
            self.step,
            self.names,
            self.slots[rows],
            self.starts[rows],
            self.ends[rows],
            self.samples[rows],
            codes[rows[: np.searchsorted(rows, len(codes))]] if len(codes) else codes,
            tuple((reason, slots) for reason, slots in left_out if len(slots)),
        )
