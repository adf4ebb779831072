"""The in-flight batching loop: admit, plan, submit, and read the step before.

Step n+1 is planned and submitted before the ids of step n are read, so host work hides behind
the executor. Hence an end the host learns from an id (EOS, stop id, stop string) is seen one
step late: the request's row in the step already submitted is surplus, its result is dropped, and
slot and pages are given back once that step has been read. An end by `max_tokens` is known when
planning and needs no surplus row.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.packing import pack_step
from tapeout.runtime.scheduler.capacity import Admission, CapacityScheduler, Waiting
from tapeout.runtime.scheduler.microbatch import MicroBatchScheduler, StepPlan
from tapeout.runtime.scheduler.request import Finish, FinishReason, Request
from tapeout.runtime.scheduler.running import Running
from tapeout.runtime.step import Executor, Logprob, StepHandle, StepResult

logger = logging.getLogger("tapeout")


@dataclass(frozen=True)
class LoopStats:
    """Counts since the start, and what holds now."""

    steps: int
    prompt_tokens: int
    generation_tokens: int
    surplus_rows: int
    failed_steps: int
    requests_finished: int
    num_requests_running: int
    num_requests_waiting: int
    kv_pages_used: int
    kv_pages_total: int


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    handle: StepHandle


@dataclass(frozen=True)
class StepRecord:
    """What one turn of the loop decided; `explain` gives it line by line."""

    admitted: tuple[Admission, ...]
    waiting: Waiting | None
    plan: StepPlan

    def explain(self) -> list[str]:
        lines = [f"{a.request_id}: {a.reason()}" for a in self.admitted]
        if self.waiting is not None:
            lines.append(f"{self.waiting.request_id}: {self.waiting.reason()}")
        lines += [
            f"{s.request_id}: {s.reason.value}: {s.num_tokens} from position {s.start}"
            for s in self.plan.scheduled
        ]
        lines += [f"{s.request_id}: {s.reason.value}" for s in self.plan.skipped]
        return lines


class EngineLoop:
    """Drives an executor; not thread-safe, its owner holds a lock.

    Args:
        executor: runs the steps in order.
        kv_cache, capacity, microbatch: the state it orders; all sized for the executor's pool.
        clock: seconds, monotonic.
        on_step: called with the record of every turn that planned rows, for `explain` and tests.
    """

    def __init__(
        self,
        executor: Executor,
        kv_cache: KvCache,
        capacity: CapacityScheduler,
        microbatch: MicroBatchScheduler,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.executor = executor
        self.kv_cache = kv_cache
        self.capacity = capacity
        self.microbatch = microbatch
        self.clock = clock
        self.on_step = on_step
        self._waiting: dict[str, Request] = {}  # arrival order; a dict so that abort is O(1)
        self.running = Running(
            num_slots=capacity.max_batch_size, max_output_tokens=executor.limits.max_seq_len
        )
        self._draining: dict[str, Request] = {}  # ended, but part of a step not read yet
        self._in_flight: deque[_InFlight] = deque()
        self._next_step = 0
        self._last_read = -1
        self._counts = dict.fromkeys(
            ("prompt_tokens", "generation_tokens", "surplus_rows", "failed_steps", "requests_finished"), 0
        )

    # ---- requests come and go -------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or len(self.running) or self._in_flight)

    @property
    def steps_read(self) -> int:
        """Steps whose results have been handed out; they are read in the order of their numbers."""
        return self._last_read + 1

    def add(self, request: Request) -> None:
        """Queue a request. The caller has refused what can never run."""
        self._waiting[request.request_id] = request

    def hand_over(self, request_id: str) -> None:
        """Give the sink of a running request the tokens it has not had, for a consumer that wants them now.

        Nothing happens for a request that is watched, waits, or has ended: its sink has them all.
        """
        request = self.running.get(request_id)
        if request is not None and not request.watched:
            try:
                self._deliver(request, ending=False)
            except Exception as error:
                self._finish(request, _output_failed(request, error))

    def abort(self, request_id: str, stop_reason: str | None = None) -> bool:
        """End a request now; False when it is not known or has ended."""
        request = self._waiting.get(request_id) or self.running.get(request_id)
        if request is None:
            return False
        self._finish(request, Finish(FinishReason.ABORT, stop_reason))
        return True

    def abort_all(self) -> None:
        """End every request and wait for the executor, so that it can be closed."""
        for request_id in [*self._waiting, *self.running.names()]:
            self.abort(request_id)
        while self._in_flight:
            self._read(self._in_flight[0])

    def stats(self) -> LoopStats:
        pool = self.kv_cache.pool
        return LoopStats(
            steps=self._next_step,
            num_requests_running=len(self.running),
            num_requests_waiting=len(self._waiting),
            kv_pages_used=pool.num_pages - pool.num_free,
            kv_pages_total=pool.num_pages,
            **self._counts,
        )

    # ---- one turn -------------------------------------------------------------------------

    def step(self) -> bool:
        """Plan and submit one step, then read the one before; True while there is work."""
        admitted, waiting = self._admit()
        plan = self.microbatch.plan(self._next_step, self.running)
        if plan.num_sequences:
            if self.on_step is not None:
                self.on_step(StepRecord(admitted, waiting, plan))
            self._submit(plan)
        if len(self._in_flight) > 1 or (self._in_flight and not plan.num_sequences):
            self._read(self._in_flight[0])
        return self.has_work

    def _admit(self) -> tuple[tuple[Admission, ...], Waiting | None]:
        if not self._waiting:
            return (), None
        if self.kv_cache.any_to_store and self.capacity.num_free_slots:
            self._store_pages()
        front = islice(self._waiting.values(), self.capacity.num_free_slots + 1)
        admitted, waiting = self.capacity.admit(front, self.kv_cache)
        now = self.clock()
        for request, _ in admitted:
            del self._waiting[request.request_id]
            self.running.add(request)
            self.running.cached_tokens[request.slot] = request.cache.attached_tokens
            request.times.admitted = now
            try:
                self.executor.admit(request.slot, request.params, request.prompt_token_ids)
            except Exception as error:
                logger.exception("request %s: the executor refused it", request.request_id)
                self._fail(request, error)
        return tuple(a for _, a in admitted), waiting

    def _submit(self, plan: StepPlan) -> None:
        """Queue the step and move its requests' planned state forward."""
        self._next_step += 1
        running, slots = self.running, plan.slots
        running.cached_tokens[slots] = plan.ends
        running.planned_tokens[slots] += plan.samples
        self.kv_cache.grow(slots, plan.ends)
        try:
            if self.kv_cache.has_copies:
                self._copy_pages()
            handle = self.executor.submit(pack_step(plan, running, self.kv_cache))
        except Exception as error:
            self._fail_step(plan, error)
            return
        running.last_step[slots] = plan.step
        self._in_flight.append(_InFlight(plan, handle))
        self._counts["prompt_tokens"] += int(plan.sizes[: plan.num_context].sum())

    def _copy_pages(self) -> None:
        """Have the executor carry out page copies before the step that relies on them."""
        try:
            self.executor.copy_pages(self.kv_cache.take_copies())
        except Exception as error:
            # What the pages hold is not known any more, whoever they are of.
            self.kv_cache.clear()
            for request_id in self.running.names():
                if (request := self.running.get(request_id)) is not None:
                    self._fail(request, error)
            raise

    def _read(self, step: _InFlight) -> None:
        """Wait for a step, hand out its ids, and release what no later step uses."""
        outcome: StepResult | Exception
        try:
            outcome = step.handle.result()
        except Exception as error:
            outcome = error
        # Only now: a KeyboardInterrupt while waiting leaves the step in flight, to be read later.
        self._in_flight.popleft()
        self._last_read = step.plan.step
        self.kv_cache.step_read(self._last_read)
        if isinstance(outcome, Exception):
            self._fail_step(step.plan, outcome)
        else:
            self._hand_out(step.plan, outcome)
        if self._draining:
            for request in [r for r in self._draining.values() if not self._in_unread_step(r)]:
                del self._draining[request.request_id]
                self._release(request)

    def _hand_out(self, plan: StepPlan, result: StepResult) -> None:
        """Take the ids of all rows at once, then look at the requests that something happens to."""
        now, running = self.clock(), self.running
        slots, token_ids = plan.sampled_slots, result.token_ids
        logprobs: Sequence[dict[int, Logprob] | None] = result.logprobs
        alive = running.alive[slots]
        taken = alive & result.finite
        if not taken.all():
            self._counts["surplus_rows"] += len(slots) - int(np.count_nonzero(alive))
            for row in np.flatnonzero(alive & ~result.finite).tolist():
                if running.alive[slots[row]]:  # a consumer may just have ended it
                    position = int(plan.starts[plan.samples][row])
                    self._fail(running.request(slots[row]), _not_finite(position))
            slots, token_ids = slots[taken], token_ids[taken]
            logprobs = [logprobs[row] for row in np.flatnonzero(taken).tolist()]
        self._counts["generation_tokens"] += len(slots)
        for i in running.append(slots, token_ids).tolist():
            if running.alive[slots[i]]:
                self._look_at(running.request(slots[i]), int(token_ids[i]), logprobs[i], now)
        if self.kv_cache.any_to_store and self.kv_cache.events.enabled:
            self._store_pages()

    def _store_pages(self) -> None:
        """Leave pages that have become full to the prefix cache. It sees them when somebody looks: before
        an admission, at their request's end, after every step when events tell others of them."""
        # Finite logits show that what a request has in the cache is sound; before, nothing does.
        ready = self.running.alive & (self.running.output_tokens > 0)
        for slot in self.kv_cache.slots_to_store(ready):
            self._store(self.running.request(slot))

    def _store(self, request: Request) -> None:
        slot, prompt = request.slot, request.prompt_token_ids
        count = int(self.running.output_tokens[slot])
        output = self.running.output_ids[slot]

        def token_ids(start: int, end: int) -> np.ndarray:
            if start >= len(prompt):
                return output[start - len(prompt) : end - len(prompt)]
            return np.concatenate([prompt[start:end], output[: max(end - len(prompt), 0)]])

        # The last id has been read, but it has not been, or may not have been, in a step that was.
        known = len(prompt) + count - 1
        self.kv_cache.store(slot, known, token_ids, int(self.running.last_step[slot]))

    def _look_at(
        self, request: Request, token_id: int, logprobs: dict[int, Logprob] | None, now: float
    ) -> None:
        """A token was read that is its request's first, may be its last, or is watched for."""
        output_tokens = int(self.running.output_tokens[request.slot])
        if output_tokens == 1:
            request.times.first_token = now
        finish = _ended_by_id(request, token_id, output_tokens) if token_id in request.ending_ids else None
        if request.watched:
            try:
                stop = request.sink.on_token(token_id, logprobs, finish is not None)
            except Exception as error:
                self._finish(request, _output_failed(request, error))
                return
            if finish is None and stop is not None:
                finish = Finish(FinishReason.STOP, stop)
        if finish is None and output_tokens >= request.max_tokens:
            finish = Finish(FinishReason.LENGTH)
        if finish is not None:
            self._finish(request, finish)
        else:
            self.running.looked_at(request)

    def _deliver(self, request: Request, *, ending: bool) -> None:
        """Give the sink all tokens read since the last time; raises what it raises."""
        token_ids = self.running.ids_from(request.slot, request.handed_tokens)
        if token_ids:
            request.handed_tokens += len(token_ids)
            request.sink.on_tokens(token_ids, ending)

    # ---- ends -----------------------------------------------------------------------------

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        self._counts["failed_steps"] += 1
        logger.error("step %d failed: %s", plan.step, error, exc_info=error)
        for slot in plan.slots.tolist():
            if self.running.alive[slot]:
                self._fail(self.running.request(slot), error)

    def _fail(self, request: Request, error: Exception | str) -> None:
        self._finish(request, _failed(error))

    def _finish(self, request: Request, finish: Finish) -> None:
        """End a request; its slot and pages stay until the executor is done with them."""
        waited = self._waiting.pop(request.request_id, None) is not None
        if not waited and not request.watched:
            try:
                self._deliver(request, ending=finish.reason is FinishReason.STOP)
            except Exception as error:
                finish = _output_failed(request, error)
        request.finish = finish
        request.times.finished = self.clock()
        self._counts["requests_finished"] += 1
        self.running.remove(request)
        if not waited:
            if self._in_unread_step(request):
                self._draining[request.request_id] = request
            else:
                self._release(request)
        try:
            request.sink.on_finish(finish, request.times)
        except Exception:
            logger.exception("request %s: its consumer failed", request.request_id)

    def _in_unread_step(self, request: Request) -> bool:
        return bool(self.running.last_step[request.slot] > self._last_read)

    def _release(self, request: Request) -> None:
        failed = request.finish is not None and request.finish.reason is FinishReason.ERROR
        if not failed and self.running.output_tokens[request.slot] > 0:
            self._store(request)
        self.kv_cache.free(request.slot, failed=failed)
        self.capacity.release(request)


def _failed(error: Exception | str) -> Finish:
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return Finish(FinishReason.ERROR, text)


def _output_failed(request: Request, error: Exception) -> Finish:
    """One request's text must not take down the others."""
    logger.error("request %s: its output failed", request.request_id, exc_info=error)
    return _failed(error)


def _not_finite(position: int) -> str:
    return (
        f"no token can be chosen at position {position}: logits or what penalties make of them are not finite"
    )


def _ended_by_id(request: Request, token_id: int, output_tokens: int) -> Finish | None:
    if output_tokens < request.params.min_tokens:
        return None
    # A stop id the user named is told even where it is an EOS id as well.
    return Finish(FinishReason.STOP, token_id if token_id in request.stop_token_ids else None)
