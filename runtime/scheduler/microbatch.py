"""The micro-batch scheduler: which rows run in the next step."""

from __future__ import annotations

import numpy as np

from tapeout.runtime.scheduler.chunking import Chunking
from tapeout.runtime.scheduler.plan import CONTEXT_REASONS, LAST_CHUNK, Reason, StepPlan
from tapeout.runtime.scheduler.policies import ChunkingPolicy
from tapeout.runtime.scheduler.running import Running

_UNLIMITED = np.iinfo(np.int32).max
_NO_CODES = np.zeros(0, np.int8)
_ONE = np.array(1, np.int32)  # NumPy takes less time for it than for a number of Python's
#: The reason of a chunk as large as the policy makes them, and of one that the budget made smaller.
_CUT = {
    ChunkingPolicy.FIRST_COME_FIRST_SERVED: (Reason.CHUNK_BY_LIMIT, Reason.CHUNK_BY_BUDGET),
    ChunkingPolicy.EQUAL_PROGRESS: (Reason.CHUNK_BY_LIMIT, Reason.CHUNK_EQUAL),
    ChunkingPolicy.FORCE_CHUNK: (Reason.CHUNK_FORCED, Reason.CHUNK_BY_BUDGET),
}


class MicroBatchScheduler:
    """Fills `max_num_tokens`: generation first, the rest with context by the chunking policy.

    A plan depends on the step's number and the running requests alone and costs time linear in their
    number. Every running request advances within a bounded number of steps, whatever arrives:
    generation rows that do not all fit take turns by the step they last ran in; while any context
    waits at least one row is kept for it (with a budget of one row, every other step); and of the
    requests in context the first by rank always gets tokens, so that a later one waits for no more
    than the context of those before it. Under EQUAL_PROGRESS it waits for one chunk of each at most.

    Args:
        chunk_tokens: most context tokens of one request in a step; under FORCE_CHUNK their number,
            None being a page's worth.
        tokens_per_page: chunks end with pages (see chunking.py); 1 = anywhere.
    """

    def __init__(
        self,
        *,
        max_num_tokens: int,
        chunk_tokens: int | None = None,
        tokens_per_page: int = 1,
        policy: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED,
    ) -> None:
        self.max_num_tokens = max_num_tokens
        self.policy = policy
        if chunk_tokens is None:
            # More than any prompt has stands for no limit.
            chunk_tokens = tokens_per_page if policy is ChunkingPolicy.FORCE_CHUNK else _UNLIMITED
        self._chunking = Chunking(policy, min(chunk_tokens, _UNLIMITED), tokens_per_page)
        self._codes = tuple(CONTEXT_REASONS.index(reason) for reason in _CUT[policy])

    def plan(self, step: int, running: Running) -> StepPlan:
        """Plan step `step` over the running requests."""
        slots = running.order
        starts = running.cached_tokens[slots]
        # One comparison tells who simply generates, which in most steps is everybody.
        others = starts >= running.turn_tokens[slots]
        if not np.count_nonzero(others):  # half the time of any()
            return self._all_generate(step, running, slots, starts)
        places = others.nonzero()[0]
        other_slots, other_starts = slots[places], starts[places]
        in_context = other_starts < running.context_tokens[other_slots]
        context, context_starts = other_slots[in_context], other_starts[in_context]
        left_out: list[tuple[Reason, np.ndarray]] = []
        if len(context) < len(places):
            left_out.append((Reason.ALL_PLANNED, other_slots[~in_context]))
        generates = ~others
        slots, starts = slots[generates], starts[generates]
        kept = self._reserved(step, running, context, slots)
        slots, starts = self._in_turn(running, slots, starts, self.max_num_tokens - kept, left_out)
        budget = self.max_num_tokens - len(slots)
        if len(context) == 0 or budget == 0:
            if len(context):
                left_out.append((Reason.NO_BUDGET, context))
            return _plan(step, running, slots, starts, starts + 1, left_out)
        sizes, codes = self._fill(running, context, context_starts, budget)
        if np.count_nonzero(sizes) < len(sizes):
            served = sizes > 0
            left_out.append((Reason.NO_BUDGET, context[~served]))
            context, context_starts = context[served], context_starts[served]
            sizes, codes = sizes[served], codes[served]
        return _plan(
            step,
            running,
            np.concatenate((context, slots)),
            np.concatenate((context_starts, starts)),
            np.concatenate((context_starts + sizes, starts + 1)),
            left_out,
            codes,
        )

    def _all_generate(self, step: int, running: Running, slots: np.ndarray, starts: np.ndarray) -> StepPlan:
        left_out: list[tuple[Reason, np.ndarray]] = []
        slots, starts = self._in_turn(running, slots, starts, self.max_num_tokens, left_out)
        return _plan(step, running, slots, starts, starts + _ONE, left_out)

    def _in_turn(
        self,
        running: Running,
        slots: np.ndarray,
        starts: np.ndarray,
        room: int,
        left_out: list[tuple[Reason, np.ndarray]],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Who of those that generate gets the `room` rows, and where they go on."""
        if len(slots) <= room:
            return slots, starts
        turn = np.argsort(running.last_step[slots], kind="stable")  # ties by rank
        left_out.append((Reason.NO_BUDGET, slots[turn[room:]]))
        chosen = np.sort(turn[:room])
        return slots[chosen], starts[chosen]

    def _reserved(self, step: int, running: Running, context: np.ndarray, generation: np.ndarray) -> int:
        """Rows kept for context although generation could take them."""
        if len(context) == 0 or len(generation) < self.max_num_tokens:
            return 0
        if self.max_num_tokens > 1:
            return 1
        # Not compared with generation's last step: who ran in the step before may be gone by now.
        return int(running.last_step[context].max() < step - 1)

    def _fill(
        self, running: Running, context: np.ndarray, starts: np.ndarray, budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """int32 [C] tokens of each request in context, and int8 [C] why so many."""
        rest = running.context_tokens[context] - starts
        sizes, wanted = self._chunking.sizes(starts, rest, lambda: running.last_step[context], budget)
        if sizes is rest:
            return sizes, np.zeros(len(sizes), np.int8)  # LAST_CHUNK
        as_large_as_can_be, smaller = self._codes
        codes = np.where(sizes == wanted, as_large_as_can_be, smaller)
        return sizes, np.where(sizes == rest, LAST_CHUNK, codes).astype(np.int8)


def _plan(
    step: int,
    running: Running,
    slots: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    left_out: list[tuple[Reason, np.ndarray]],
    codes: np.ndarray = _NO_CODES,
) -> StepPlan:
    samples = np.ones(len(slots), bool)
    if len(codes):
        samples[: len(codes)] = codes == LAST_CHUNK
    return StepPlan(step, running.names_by_slot(), slots, starts, ends, samples, codes, tuple(left_out))
