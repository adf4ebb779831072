"""The in-flight batching loop: admit, plan, submit, and read the step before.

Step n+1 is planned and submitted before the ids of step n are read, so host work hides behind
the executor. Hence an end the host learns from an id (EOS, stop id, stop string) is seen one
step late: the request's row in the step already submitted is surplus, its result is dropped, and
slot and pages are given back once that step has been read. An end by `max_tokens` is known when
planning and needs no surplus row. A request that is paused follows the same rule, and then waits
again, with prompt and output so far as its context.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from tapeout.runtime.decisions import Decisions
from tapeout.runtime.delivery import Delivery
from tapeout.runtime.ends import failed, not_finite, output_failed
from tapeout.runtime.engine import Engine
from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.leftovers import Leftovers
from tapeout.runtime.observe import LoopCounts, LoopStats, Observer
from tapeout.runtime.packing import pack_step
from tapeout.runtime.scheduler.capacity import CapacityScheduler, Held
from tapeout.runtime.scheduler.microbatch import MicroBatchScheduler
from tapeout.runtime.scheduler.plan import StepPlan
from tapeout.runtime.scheduler.policies import PRIORITY_STEPS
from tapeout.runtime.scheduler.queue import WaitingQueue
from tapeout.runtime.scheduler.record import PauseCause, StepRecord
from tapeout.runtime.scheduler.request import Finish, FinishReason, Request
from tapeout.runtime.scheduler.room import LackingRows, fit_to_pages, lacking_pages, slots_to_pause
from tapeout.runtime.scheduler.running import Running
from tapeout.runtime.step import Executor, StepResult
from tapeout.runtime.unread import UnreadSteps

logger = logging.getLogger("tapeout")


class EngineLoop:
    """Drives an executor; not thread-safe, its owner holds a lock.

    Args:
        executor: runs the steps in order.
        kv_cache, capacity, microbatch: the state it orders; all sized for the executor's pool.
        overlap: plan the next step before a step is read. Without it host and executor take turns: for
            simulations in which an end is to show in the very step that brought it.
        clock: seconds, monotonic.
        on_step: called with the record of every step: every turn in which something was decided. The step
            is on its way by then, so that it may end requests.
        observer: sees arrivals and ends, too.
    """

    def __init__(
        self,
        executor: Executor,
        kv_cache: KvCache,
        capacity: CapacityScheduler,
        microbatch: MicroBatchScheduler,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepRecord], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.executor = executor
        self.kv_cache = kv_cache
        self.capacity = capacity
        self.microbatch = microbatch
        self.clock = clock
        self.on_step = on_step
        self.observer = observer
        self._most_in_flight, self._admits = (1 if overlap else 0), True
        self._waiting = WaitingQueue()
        self.running = Running(
            num_slots=capacity.max_batch_size, max_output_tokens=executor.limits.max_seq_len
        )
        self._unread = UnreadSteps(self.running)
        self._leftovers = Leftovers(self.running, kv_cache, capacity)
        self._delivery = Delivery(self.running, self._finish)
        self._next_step = 0
        self._arrivals = 0
        self._decisions = Decisions(self.running, kv_cache)
        self._counts = LoopCounts()

    # ---- requests come and go -------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or len(self.running) or len(self._unread))

    @property
    def is_vacant(self) -> bool:
        """Nobody runs, and every step has been read."""
        return not len(self.running) and not len(self._unread)

    @property
    def steps_read(self) -> int:
        """Steps whose results have been handed out; they are read in the order of their numbers."""
        return self._unread.last_read + 1

    @property
    def next_step(self) -> int:
        """Number of the step that will be planned next."""
        return self._next_step

    def skip_to(self, step: int) -> None:
        """Number the next step so; for simulated time in which nothing happened. Nothing may be running."""
        if self.has_work or step < self._next_step:
            raise RuntimeError(f"step {step} cannot follow {self._next_step - 1} now")
        self._next_step = step
        self._unread.skip_to(step)

    def add(self, request: Request) -> None:
        """Queue a request; one that can never fit into the pool ends at once, with the numbers."""
        request.rank = (self._next_step - request.priority * PRIORITY_STEPS, self._arrivals)
        self._arrivals += 1
        self._waiting.add(request)
        if self.observer is not None:
            self.observer.on_arrival(request, self._next_step)
        if (refusal := self.capacity.refusal(request)) is not None:
            self._fail(request, refusal)

    def hand_over(self, request_id: str) -> None:
        """Give the sink of a running request the tokens it has not had, for a consumer that wants them now.

        Nothing happens for a request that is watched, waits, or has ended: its sink has them all.
        """
        if (request := self.running.get(request_id)) is not None:
            self._delivery.hand_over(request)

    def abort(self, request_id: str, stop_reason: str | None = None) -> bool:
        """End a request now; False when it is not known or has ended."""
        request = self._waiting.get(request_id) or self.running.get(request_id)
        if request is None:
            return False
        self._finish(request, Finish(FinishReason.ABORT, stop_reason))
        return True

    def abort_running(self) -> None:
        """End every request that runs; those that wait go on waiting."""
        for request_id in self.running.names():
            self.abort(request_id)

    def abort_all(self) -> None:
        """End every request and wait for the executor, so that it can be closed."""
        for request_id in [*(r.request_id for r in self._waiting), *self.running.names()]:
            self.abort(request_id)
        self._read_all()

    def hold_admissions(self, hold: bool) -> None:
        """Give no slot to anybody who waits, or do so again."""
        self._admits = not hold

    def pause_all(self) -> None:
        """Pause every running request and read all steps: they wait again, and what they have is context."""
        self._pause(self.running.order[::-1], PauseCause.WEIGHTS)
        self._read_all()

    def load_weights(self, engine: Engine) -> None:
        """Have the executor run with other weights; nothing that was computed before is served again.

        Nobody may run: what they have in the KV cache comes from the old weights.
        """
        if not self.is_vacant:
            raise RuntimeError("weights cannot change while requests run")
        self.kv_cache.clear()  # whether it succeeds or fails half-way
        self.executor.load_weights(engine)
        self.kv_cache.set_weights(engine.weights_digest)

    def stats(self) -> LoopStats:
        return LoopStats(
            num_requests_running=len(self.running),
            num_requests_waiting=len(self._waiting),
            kv_pages_used=self.kv_cache.num_used,
            kv_pages_total=self.kv_cache.num_pages,
            **asdict(self._counts),
        )

    # ---- one turn -------------------------------------------------------------------------

    def step(self) -> bool:
        """Plan and submit one step, then read the one before; True while there is work."""
        held = self._admit()
        plan = self.microbatch.plan(self._next_step, self.running)
        if self.capacity.may_pause and (lacking := lacking_pages(plan, self.kv_cache)) is not None:
            plan = self._make_room(plan, lacking)
        if plan.num_sequences:
            self._submit(plan, held)
        elif self._decisions.any:  # all pages are still on their way back
            record = self._record(held, plan, self.kv_cache.num_used)
            self._next_step += 1
            self._tell(record)
        while len(self._unread) > (self._most_in_flight if plan.num_sequences else 0):
            self._read()
        return self.has_work

    def _admit(self) -> Held | None:
        """Give slots to waiting requests; why the next one gets none."""
        if not self._waiting:
            return None
        if not self._admits:
            return self.capacity.held_for_weights(self._waiting)
        if self.kv_cache.any_unstored and self.capacity.num_free_slots:
            self._leftovers.store_contexts()
        heard = self._is_heard
        admitted, held = self.capacity.admit(self._waiting, self.running, self.kv_cache, is_heard=heard)
        now = self.clock()
        for request, admission in admitted:
            self.running.add(request)
            self._decisions.admit(admission)
            if request.times.admitted is None:
                request.times.admitted = now
            if request.pauses:
                self._counts.recomputed_tokens += admission.recompute_tokens
            try:
                self.executor.admit(
                    request.slot, request.params, request.prompt_token_ids, request.output_token_ids
                )
            except Exception as error:
                logger.exception("request %s: the executor refused it", request.request_id)
                self._fail(request, error)
        return held

    def _make_room(self, plan: StepPlan, lacking: LackingRows) -> StepPlan:
        """Pause the newest requests until the others have pages, if not in this step then in the next."""
        running, kv_cache = self.running, self.kv_cache
        draining = [r.slot for r in self._unread.draining()]
        short = lacking.total - kv_cache.num_free
        self._pause(slots_to_pause(plan, lacking, running, kv_cache, draining), PauseCause.PAGES, short)
        return fit_to_pages(plan, lacking, running, kv_cache)

    def _pause(self, slots: np.ndarray, cause: PauseCause, short_pages: int = 0) -> None:
        requests = self.running.requests_in(slots)
        self._decisions.pause(requests, slots, cause, short_pages, self._is_heard)
        self._counts.pauses += len(requests)
        self.running.pause(slots)
        for request in self._unread.hold_all(requests, slots):
            if request.finish is None:  # a consumer of another one may just have ended it
                self._queue_again(request)

    def _queue_again(self, request: Request) -> None:
        """A paused request gives back slot and pages; its tokens so far become context."""
        slot, running = request.slot, self.running
        if not self._delivery.hand_over(request):
            return
        output_ids = running.output_ids[slot, : running.output_tokens[slot]]
        request.paused_with(output_ids, int(running.cached_tokens[slot]))
        running.remove(request)
        self._leftovers.release(request)
        self._waiting.add(request)

    @property
    def _is_heard(self) -> bool:
        return self.on_step is not None or self.observer is not None

    def _record(self, held: Held | None, plan: StepPlan, pages_used: int) -> StepRecord | None:
        """What was decided for a step, which the observer is told; None where nobody listens."""
        evicted, record = self.kv_cache.take_evictions(), None
        if self._is_heard:
            record = self._decisions.record(held, plan, len(self._waiting), pages_used, evicted)
        self._decisions.clear()
        if record is not None and self.observer is not None:
            self.observer.on_step(record)
        return record

    def _tell(self, record: StepRecord | None) -> None:
        """Last thing about a step, since a caller's function may end requests, or raise."""
        if record is not None and self.on_step is not None:
            self.on_step(record)

    def _submit(self, plan: StepPlan, held: Held | None) -> None:
        """Give the step its pages, queue it, move its requests' planned state forward, and tell of it."""
        used, failure = (self.kv_cache.num_used if self._is_heard else 0), None
        try:
            self.kv_cache.grow(plan.slots, plan.ends)
        except Exception as error:
            failure = error
        record = self._record(held, plan, used)
        self._next_step += 1
        self._counts.steps += 1
        self.running.advance(plan)
        try:
            if failure is not None:
                raise failure
            if self.kv_cache.has_copies:
                self._copy_pages()
            handle = self.executor.submit(pack_step(plan, self.running, self.kv_cache))
        except Exception as error:
            self._fail_step(plan, error)
        else:
            self._unread.add(plan, handle)
            self._counts.prompt_tokens += plan.context_rows
        self._tell(record)

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

    def _read(self) -> None:
        """Wait for the first unread step, hand out its ids, and release what no later step uses."""
        step = self._unread.first()
        outcome: StepResult | Exception
        try:
            outcome = step.handle.result()
        except Exception as error:
            outcome = error
        # Only now: a KeyboardInterrupt while waiting leaves the step in flight, to be read later.
        self._unread.was_read()
        self.kv_cache.step_read(step.plan.step)
        if isinstance(outcome, Exception):
            self._fail_step(step.plan, outcome)
        else:
            self._hand_out(step.plan, outcome)
        for request in self._unread.drained():
            if request.finish is None:
                self._queue_again(request)
            else:
                self._leftovers.release(request)

    def _read_all(self) -> None:
        while len(self._unread):
            self._read()

    def _hand_out(self, plan: StepPlan, result: StepResult) -> None:
        """Take the ids of all rows at once, then look at the requests that something happens to."""
        now, running = self.clock(), self.running
        slots, token_ids = plan.sampled_slots, result.token_ids
        rows: np.ndarray | None = None  # of the step, where some are left out
        alive = running.alive[slots]
        taken = alive & result.finite
        if np.count_nonzero(taken) < len(taken):
            self._counts.surplus_rows += len(slots) - int(np.count_nonzero(alive))
            for row in np.flatnonzero(alive & ~result.finite).tolist():
                if running.alive[slots[row]]:  # a consumer may just have ended it
                    position = int(plan.starts[plan.samples][row])
                    self._fail(running.request(slots[row]), not_finite(position))
            rows = taken.nonzero()[0]
            slots, token_ids = slots[rows], token_ids[rows]
        self._counts.generation_tokens += len(slots)
        for i in running.append(slots, token_ids).tolist():
            if running.alive[slots[i]]:
                logprobs = result.logprobs[i if rows is None else rows[i]]
                self._delivery.look_at(running.request(slots[i]), int(token_ids[i]), logprobs, now)
        if self.kv_cache.any_unstored and self.kv_cache.events.enabled:
            self._leftovers.store_contexts()

    # ---- ends -----------------------------------------------------------------------------

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        self._counts.failed_steps += 1
        logger.error("step %d failed: %s", plan.step, error, exc_info=error)
        for slot in plan.slots.tolist():
            if self.running.alive[slot]:
                self._fail(self.running.request(slot), error)

    def _fail(self, request: Request, error: Exception | str) -> None:
        self._finish(request, failed(error))

    def _finish(self, request: Request, finish: Finish) -> None:
        """End a request; its slot and pages stay until the executor is done with them."""
        waited = self._waiting.remove(request.request_id) is not None
        if not waited and not request.watched:
            try:
                self._delivery.deliver(request, ending=finish.reason is FinishReason.STOP)
            except Exception as error:
                finish = output_failed(request, error)
        request.finish = finish
        request.times.finished = self.clock()
        self._counts.requests_finished += 1
        self.running.remove(request)
        if self.observer is not None:
            self._tell_end(request, waited)
        if not waited and not self._unread.hold(request):
            self._leftovers.release(request)
        try:
            request.sink.on_finish(finish, request.times)
        except Exception:
            logger.exception("request %s: its consumer failed", request.request_id)

    def _tell_end(self, request: Request, waited: bool) -> None:
        assert self.observer is not None
        output_tokens, last_step = len(request.output_token_ids), -1
        if not waited:
            output_tokens = int(self.running.output_tokens[request.slot])
            last_step = int(self.running.last_step[request.slot])
        # A later step that holds a row of it has not been read, and its row is surplus.
        step = min(last_step, self._unread.last_read) if last_step >= 0 and output_tokens else self._next_step
        self.observer.on_finish(request, step, output_tokens)
