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
        self._true = np.ones(0, bool)
        self._codes = tuple(CONTEXT_REASONS.index(reason) for reason in _CUT[policy])

    def plan(self, step: int, running: Running) -> StepPlan:
        """Plan step `step` over the running requests."""
        slots = running.order
        starts = running.cached_tokens[slots]
        # One comparison tells who simply generates, which in most steps is everybody.
        others = starts >= running.turn_tokens[slots]
        if not np.count_nonzero(others):  # half the time of any()
            return self._all_generate(step, running, slots, starts)
        # From here on requests are places in `slots`, so that those with rows are picked out once at last.
        context = others.nonzero()[0]
        rest = running.context_tokens[slots[context]] - starts[context]
        left_out: list[tuple[Reason, np.ndarray]] = []
        reads = rest > 0
        if np.count_nonzero(reads) < len(context):
            left_out.append((Reason.ALL_PLANNED, slots[context[~reads]]))
            context, rest = context[reads], rest[reads]
        generation = np.logical_not(others, out=others).nonzero()[0]
        if len(generation) >= self.max_num_tokens:
            kept = self._reserved(step, running, slots[context])
            generation = self._in_turn(running, slots, generation, self.max_num_tokens - kept, left_out)
        budget = self.max_num_tokens - len(generation)
        if len(context) == 0 or budget == 0:
            if len(context):
                left_out.append((Reason.NO_BUDGET, slots[context]))
            starts = starts[generation]
            return self._plan(step, running, slots[generation], starts, starts + _ONE, left_out)
        sizes, codes = self._fill(running, slots[context], starts[context], rest, budget)
        if sizes is not rest and np.count_nonzero(sizes) < len(sizes):
            served = sizes > 0
            left_out.append((Reason.NO_BUDGET, slots[context[~served]]))
            context, sizes, codes = context[served], sizes[served], codes[served]
        rows = np.concatenate((context, generation))
        starts = starts[rows]
        ends = starts + _ONE
        count = len(sizes)
        np.add(starts[:count], sizes, out=ends[:count])
        return self._plan(step, running, slots[rows], starts, ends, left_out, codes)

    def _all_generate(self, step: int, running: Running, slots: np.ndarray, starts: np.ndarray) -> StepPlan:
        left_out: list[tuple[Reason, np.ndarray]] = []
        if len(slots) > self.max_num_tokens:
            places = np.arange(len(slots))
            places = self._in_turn(running, slots, places, self.max_num_tokens, left_out)
            slots, starts = slots[places], starts[places]
        return self._plan(step, running, slots, starts, starts + _ONE, left_out)

    def _in_turn(
        self,
        running: Running,
        slots: np.ndarray,
        places: np.ndarray,
        room: int,
        left_out: list[tuple[Reason, np.ndarray]],
    ) -> np.ndarray:
        """Which of the places, of those that generate, get the `room` rows."""
        if len(places) <= room:
            return places
        turn = running.last_step[slots[places]].argsort(kind="stable")  # ties by rank
        left_out.append((Reason.NO_BUDGET, slots[places[turn[room:]]]))
        chosen: np.ndarray = places[np.sort(turn[:room])]
        return chosen

    def _reserved(self, step: int, running: Running, context: np.ndarray) -> int:
        """Rows kept for context although generation could take them."""
        if len(context) == 0:
            return 0
        if self.max_num_tokens > 1:
            return 1
        # Not compared with generation's last step: who ran in the step before may be gone by now.
        return int(running.last_step[context].max() < step - 1)

    def _fill(
        self, running: Running, context: np.ndarray, starts: np.ndarray, rest: np.ndarray, budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """int32 [C] tokens of each request in context, `rest` itself where it gets all of that, and int8 [C]
        why so many."""
        sizes, wanted = self._chunking.sizes(starts, rest, lambda: running.last_step[context], budget)
        if sizes is rest:
            return sizes, np.zeros(len(sizes), np.int8)  # LAST_CHUNK
        as_large_as_can_be, smaller = self._codes
        codes = np.where(sizes == wanted, as_large_as_can_be, smaller)
        return sizes, np.where(sizes == rest, LAST_CHUNK, codes).astype(np.int8)

    def _plan(
        self,
        step: int,
        running: Running,
        slots: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        left_out: list[tuple[Reason, np.ndarray]],
        codes: np.ndarray = _NO_CODES,
    ) -> StepPlan:
        if len(codes) and np.count_nonzero(codes):  # somebody's context goes on after the step
            samples = np.ones(len(slots), bool)
            np.equal(codes, LAST_CHUNK, out=samples[: len(codes)])
        else:
            samples = self._all_sample(len(slots))
        return StepPlan(step, running.names_by_slot(), slots, starts, ends, samples, codes, tuple(left_out))

    def _all_sample(self, count: int) -> np.ndarray:
        """bool [count]: True throughout, to read."""
        if len(self._true) < count:
            self._true = np.ones(2 * count, bool)
            self._true.flags.writeable = False
        return self._true[:count]
