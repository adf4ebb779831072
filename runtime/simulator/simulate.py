"""Drives the loop through a workload in simulated time, which is counted in steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import SamplingParams, shown
from tapeout.plugins.sample.result import Logprob
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.kv_cache import PrefixCacheOptions
from tapeout.runtime.loop import EngineLoop
from tapeout.runtime.new_loop import SchedulerOptions, new_loop
from tapeout.runtime.observe import Observer
from tapeout.runtime.scheduler.policies import CapacityPolicy, ChunkingPolicy
from tapeout.runtime.scheduler.request import Finish, Request, RequestTimes
from tapeout.runtime.simulator.executor import ScriptedExecutor
from tapeout.runtime.simulator.workload import MAX_TOKENS, Arrival, Workload
from tapeout.runtime.trace.tally import Summary, SummaryObserver
from tapeout.runtime.trace.writer import EventMaker, start_event

#: One zero, however long: what a prompt holds is never looked at.
_ZEROS = np.broadcast_to(np.zeros(1, np.int32), MAX_TOKENS)
_GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
#: All prompts being alike, each would find the others' pages.
_NO_REUSE = PrefixCacheOptions(enable_prefix_reuse=False)
_MOST_SLOTS, _MOST_TOKENS, _MOST_PAGES = 65_536, 2**24, 2**24


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """What the schedulers are given; the defaults are those of a small GPU server.

    Raises:
        UsageError: naming every value out of its range.
    """

    policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT
    chunking: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED
    pages: int = 65_536
    tokens_per_page: int = 32
    max_batch_size: int = 64
    max_num_tokens: int = 2_048
    chunk_tokens: int | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        ranges = {
            "pages": _MOST_PAGES,
            "tokens_per_page": 2**16,
            "max_batch_size": _MOST_SLOTS,
            "max_num_tokens": _MOST_TOKENS,
            "chunk_tokens": _MOST_TOKENS,
        }
        problems = []
        for name, most in ranges.items():
            value = getattr(self, name)
            if value is None and name == "chunk_tokens":
                continue
            if type(value) is not int or not 1 <= value <= most:
                problems.append(f"{name} = {shown(value)}, expected an integer from 1 to {most:,}")
        if problems:
            raise UsageError("\n".join(problems), hint="`tapeout simulate --help` shows the defaults")

    def settings(self) -> dict[str, Any]:
        """As plain data, for traces and summaries."""
        return asdict(self)


class _NoSink:
    """Nobody reads the tokens."""

    def on_token(self, token_id: int, logprobs: dict[int, Logprob] | None, ending: bool) -> str | None:
        return None

    def on_tokens(self, token_ids: list[int], ending: bool) -> None:
        pass

    def on_finish(self, finish: Finish, times: RequestTimes) -> None:
        pass


def simulate(workload: Workload, options: SimulationOptions) -> Iterator[dict[str, Any]]:
    """The events of a run (see `runtime/trace/README.md`), as they come.

    A request is queued before the step of its number is planned. Steps in which nothing runs are passed
    over: when all work is done, the next step is that of the next arrival. A request that can never fit
    into the pool is refused when it arrives.
    """
    events: list[dict[str, Any]] = []
    yield start_event(options.settings())
    for _ in _turns(workload, options, EventMaker(events.append)):
        yield from events
        events.clear()


def summarize(workload: Workload, options: SimulationOptions) -> Summary:
    """The summary of the same run: no event is made, which takes a fifth of its time."""
    counts = SummaryObserver()
    for _ in _turns(workload, options, counts):
        pass
    counts.summary.settings = options.settings()
    return counts.summary


def _turns(workload: Workload, options: SimulationOptions, observer: Observer) -> Iterator[None]:
    """Yields after every turn of the loop."""
    loop = _loop(options, workload.longest_tokens, observer)
    waiting = iter(workload)
    arrival = next(waiting, None)
    while arrival is not None or loop.has_work:
        if arrival is not None and not loop.has_work:
            loop.skip_to(max(arrival.arrival_step, loop.next_step))
        while arrival is not None and arrival.arrival_step <= loop.next_step:
            loop.add(_request(arrival))
            arrival = next(waiting, None)
        loop.step()
        yield


def _loop(options: SimulationOptions, longest_tokens: int, observer: Observer) -> EngineLoop:
    per_page = options.tokens_per_page
    # Longer requests are refused: no table has to hold them.
    max_seq_len = min(longest_tokens, options.pages * per_page)
    limits = Limits(options.max_batch_size, options.max_num_tokens, max_seq_len, per_page)
    schedulers = SchedulerOptions(
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        chunk_tokens=options.chunk_tokens,
        capacity_policy=options.policy,
        chunking_policy=options.chunking,
    )
    executor = ScriptedExecutor(limits, options.pages)
    return new_loop(executor, schedulers, cache_options=_NO_REUSE, overlap=options.overlap, observer=observer)


def _request(arrival: Arrival) -> Request:
    return Request(
        request_id=arrival.id,
        prompt_token_ids=_ZEROS[: arrival.prompt_tokens],
        params=_GREEDY,
        max_tokens=arrival.max_tokens,
        sink=_NoSink(),
        times=RequestTimes(0.0),
        watched=False,
        priority=arrival.priority,
    )
