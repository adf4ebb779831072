"""An `LLM` that is measured: it keeps the time of every token and takes requests as they arrive."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.collector import Collector
from tapeout.runtime.llm import LLM
from tapeout.runtime.scheduler.plan import StepPlan
from tapeout.runtime.scheduler.record import StepRecord

#: Longest sleep while nothing runs and the next request is not due, in seconds.
_NAP_SECONDS = 0.001
_SHOWN_FAILURES = 5


@dataclass(frozen=True)
class BenchRequest:
    """A prompt and how many tokens are generated after it, whatever they are.

    `arrival` is when it is given to the engine, in seconds after the start.
    """

    prompt_token_ids: np.ndarray
    output_len: int
    arrival: float = 0.0

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True)
class Timed:
    """When a request arrived and when each of its tokens was there: seconds after the run's start."""

    prompt_len: int
    arrival: float
    token_times: tuple[float, ...]

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def latency(self) -> float:
        return self.token_times[-1] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None where there is none."""
        after_first = len(self.token_times) - 1
        return (self.latency - self.ttft) / after_first if after_first else None


@dataclass(frozen=True)
class Run:
    """Requests that ran together, and the seconds from giving the first to the end of the last."""

    requests: tuple[Timed, ...]
    elapsed: float

    @property
    def first_token_seconds(self) -> float:
        """Until every request had its first token."""
        return max(r.token_times[0] for r in self.requests)


class MeasuredLLM(LLM):
    """Use `run` instead of `generate`; everything else is as users have it, but for prefix reuse: runs repeat
    their prompts, and every one of them is to be computed."""

    def __init__(self, engine: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(engine, **{"enable_prefix_reuse": False, **options})

    def run(self, requests: Sequence[BenchRequest], *, max_concurrency: int | None = None) -> Run:
        """Run requests, greedily and each to its full length, in flight together.

        Args:
            requests: given to the engine at their arrival, in order.
            max_concurrency: most requests the engine has at a time, waiting ones included; a request
                then arrives when one before it ends. None = no bound.

        Raises:
            UsageError: some can never run; nothing was run.
            TapeoutError: some failed while running.
        """
        params = [SamplingParams(temperature=0.0, max_tokens=r.output_len, ignore_eos=True) for r in requests]
        steps = _StepTimes()
        self._loop.on_step = steps.planned
        most = max_concurrency or len(requests)
        start = time.perf_counter()
        checked = self._intake.check([r.prompt_token_ids for r in requests], params)
        waiting = deque(zip(requests, checked, strict=True))
        collectors: list[Collector] = []
        unfinished: deque[Collector] = deque()  # and some behind the first that have ended
        try:
            while waiting or unfinished:
                now = time.perf_counter() - start
                while waiting and waiting[0][0].arrival <= now and self._has_room(most):
                    collectors.append(self._queue(waiting.popleft()[1]))
                    unfinished.append(collectors[-1])
                if unfinished:
                    self._turn()
                    steps.read(self._loop.steps_read)
                else:
                    time.sleep(min(_NAP_SECONDS, max(waiting[0][0].arrival - now, 0)))
                while unfinished and unfinished[0].finished:
                    unfinished.popleft()
        except BaseException:
            self._abort(collectors)
            raise
        finally:
            self._loop.on_step = self._on_step
        return _result(requests, collectors, steps.by_request(), start)

    def set_limits(self, max_batch_size: int, max_num_tokens: int) -> None:
        """Run with other limits at or below the engine's from now on; nothing may be running."""
        self._loop.abort_all()
        self._loop = self._new_loop(self._options.with_limits(max_batch_size, max_num_tokens))

    def _has_room(self, max_concurrency: int) -> bool:
        stats = self._loop.stats()
        return stats.num_requests_running + stats.num_requests_waiting < max_concurrency


class _StepTimes:
    """When the tokens of each step were there. Nothing is done for each request while it is measured."""

    def __init__(self) -> None:
        self._plans: dict[int, StepPlan] = {}
        self._moments: dict[int, float] = {}
        self._steps_read = 0

    def planned(self, record: StepRecord) -> None:
        self._plans[record.plan.step] = record.plan

    def read(self, steps_read: int) -> None:
        """Called after every turn of the loop, with the number of steps it has read so far."""
        if steps_read != self._steps_read:
            self._moments[steps_read - 1] = time.perf_counter()
            self._steps_read = steps_read

    def by_request(self) -> dict[str, list[float]]:
        """Moments of each request's tokens, by its id."""
        times: dict[str, list[float]] = {}
        for step, plan in self._plans.items():
            if step in self._moments:  # a failed step gave no tokens
                for row in plan.scheduled:
                    if row.samples:
                        times.setdefault(row.request_id, []).append(self._moments[step])
        return times


def _result(
    requests: Sequence[BenchRequest],
    collectors: Sequence[Collector],
    token_times: Mapping[str, list[float]],
    start: float,
) -> Run:
    timed, failed = [], []
    for index, (request, collector) in enumerate(zip(requests, collectors, strict=True)):
        (completion,) = collector.output().outputs
        if len(completion.token_ids) != request.output_len:
            failed.append(f"request {index}: {completion.finish_reason}: {completion.stop_reason}")
            continue
        moments = tuple(t - start for t in token_times[collector.request_id])
        assert len(moments) == request.output_len, f"{len(moments)} moments of {request.output_len} tokens"
        timed.append(Timed(request.prompt_len, collector.times.arrival - start, moments))
    if failed:
        more = [f"and {len(failed) - _SHOWN_FAILURES} more"] if len(failed) > _SHOWN_FAILURES else []
        raise TapeoutError(
            f"{len(failed)} of {len(requests)} requests did not run to their ends:\n"
            + "\n".join(f"  {line}" for line in failed[:_SHOWN_FAILURES] + more),
            hint="figures of such a run would say nothing",
        )
    return Run(tuple(timed), max(r.token_times[-1] for r in timed))
