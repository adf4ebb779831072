"""The micro-batch scheduler: which rows run in the next step."""

from __future__ import annotations

import numpy as np

from tapeout.runtime.scheduler.chunking import Chunking
from tapeout.runtime.scheduler.plan import CONTEXT_REASONS, LAST_CHUNK, Reason, StepPlan
from tapeout.runtime.scheduler.policies import ChunkingPolicy
from tapeout.runtime.scheduler.running import Running

_UNLIMITED = np.iinfo(np.int32).max
_NO_CODES = np.zeros(0, np.int8)
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
        wants_context = starts < running.context_tokens[slots]
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
            turn = np.argsort(running.last_step[generation], kind="stable")  # ties by rank
            left_out.append((Reason.NO_BUDGET, generation[turn[room:]]))
            generation = generation[np.sort(turn[:room])]
        budget = self.max_num_tokens - len(generation)
        if len(context) == 0 or budget == 0:
            if len(context):
                left_out.append((Reason.NO_BUDGET, context))
            return _step_plan(step, running, generation, 1, _NO_CODES, left_out)
        sizes, codes = self._fill(running, context, budget)
        served = sizes > 0
        if not served.all():
            left_out.append((Reason.NO_BUDGET, context[~served]))
            context, sizes, codes = context[served], sizes[served], codes[served]
        slots = np.concatenate([context, generation])
        sizes = np.concatenate([sizes, np.ones(len(generation), np.int32)])
        return _step_plan(step, running, slots, sizes, codes, left_out)

    def _reserved(self, step: int, running: Running, context: np.ndarray, generation: np.ndarray) -> int:
        """Rows kept for context although generation could take them."""
        if len(context) == 0 or len(generation) < self.max_num_tokens:
            return 0
        if self.max_num_tokens > 1:
            return 1
        # Not compared with generation's last step: who ran in the step before may be gone by now.
        return int(running.last_step[context].max() < step - 1)

    def _fill(self, running: Running, context: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 [C] tokens of each request in context, and int8 [C] why so many."""
        starts = running.cached_tokens[context]
        rest = running.context_tokens[context] - starts
        sizes, wanted = self._chunking.sizes(starts, rest, running.last_step[context], budget)
        as_large_as_can_be, smaller = self._codes
        codes = np.where(sizes == wanted, as_large_as_can_be, smaller)
        return sizes, np.where(sizes == rest, LAST_CHUNK, codes).astype(np.int8)


def _step_plan(
    step: int,
    running: Running,
    slots: np.ndarray,
    sizes: np.ndarray | int,
    codes: np.ndarray,
    left_out: list[tuple[Reason, np.ndarray]],
) -> StepPlan:
    starts = running.cached_tokens[slots]
    samples = np.ones(len(slots), bool)
    samples[: len(codes)] = codes == LAST_CHUNK
    names = running.request_ids
    return StepPlan(
        step=step,
        request_ids=names[slots],
        slots=slots,
        starts=starts,
        ends=starts + sizes,
        samples=samples,
        context_codes=codes,
        left_out=tuple((reason, names[left]) for reason, left in left_out),
    )
