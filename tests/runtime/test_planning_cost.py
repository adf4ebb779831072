"""What a step's planning costs does not grow with what waits, and a simulation's memory not with its length.

Time on a shared machine proves nothing, so work is counted: every call of Python or of a library, of which
array operations are one each whatever the arrays' length. Microseconds are benchmarks/planning.py's.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.engine import Limits
from tapeout.runtime.kv_cache import PrefixCacheOptions
from tapeout.runtime.loop import EngineLoop
from tapeout.runtime.new_loop import SchedulerOptions, new_loop
from tapeout.runtime.scheduler.policies import CapacityPolicy, ChunkingPolicy
from tapeout.runtime.scheduler.request import Finish, Request, RequestTimes
from tapeout.runtime.simulator.executor import ScriptedExecutor
from tapeout.runtime.simulator.simulate import SimulationOptions, simulate, summarize
from tapeout.runtime.simulator.workload import Workload
from tapeout.runtime.trace.steps import StepBuilder, steps_of

GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
PER_PAGE = 16


class NoSink:
    def on_token(self, token_id: int, logprobs: Any, ending: bool) -> None: ...

    def on_tokens(self, token_ids: list[int], ending: bool) -> None: ...

    def on_finish(self, finish: Finish, times: RequestTimes) -> None: ...


def new(running: int, policy: CapacityPolicy, chunking: ChunkingPolicy, reuse: bool = False) -> EngineLoop:
    limits = Limits(running, 4 * running, 4096, PER_PAGE)
    options = SchedulerOptions(
        max_batch_size=running, max_num_tokens=limits.max_num_tokens, chunk_tokens=PER_PAGE,
        capacity_policy=policy, chunking_policy=chunking,
    )  # fmt: skip
    cache = PrefixCacheOptions(enable_prefix_reuse=reuse)
    return new_loop(ScriptedExecutor(limits, 1 << 17), options, cache_options=cache)


def add(loop: EngineLoop, count: int, prompt: int = 1) -> None:
    for _ in range(count):
        ids = np.full(prompt, loop._arrivals, np.int32)
        name, times = f"q{loop._arrivals}", RequestTimes(0.0)
        loop.add(Request(name, ids, GREEDY, 2_000, NoSink(), times, watched=False))


def calls(work: Callable[[], Any]) -> int:
    """Calls that `work` makes, of Python functions and of those of libraries."""
    count = 0

    def hook(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("policy", CapacityPolicy)
def test_a_step_takes_no_more_calls_however_many_wait(policy: CapacityPolicy) -> None:
    counts = []
    for waiting in (10, 3_000):
        loop = new(8, policy, ChunkingPolicy.FIRST_COME_FIRST_SERVED)
        add(loop, 8)
        for _ in range(20):
            loop.step()
        add(loop, waiting)
        steady = [calls(loop.step) for _ in range(2 * PER_PAGE)]
        victim = loop.running.request(int(loop.running.order[0])).request_id
        loop.abort(victim)  # another one takes its slot
        counts.append([*steady, *(calls(loop.step) for _ in range(5))])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("chunking", ChunkingPolicy)
@pytest.mark.parametrize("reuse", [False, True])
def test_a_step_takes_no_more_calls_however_many_run(chunking: ChunkingPolicy, reuse: bool) -> None:
    """All generate and none begins or ends: what a step does for each of them is in the array operations, and
    a page for every sixteenth of them."""
    counts = []
    for running in (32, 1_024):
        loop = new(running, CapacityPolicy.GUARANTEED_NO_EVICT, chunking, reuse)
        add(loop, running)
        for _ in range(20):
            loop.step()
        assert (loop.running.output_tokens[:running] > 1).all()
        counts.append([calls(loop.step) for _ in range(2 * PER_PAGE)])
    assert counts[0] == counts[1]
    assert max(counts[0]) < 150


def test_context_costs_by_the_requests_that_read_it() -> None:
    """Packing names their prompts one by one; planning them does not."""
    counts = []
    for running in (16, 256):
        loop = new(running, CapacityPolicy.GUARANTEED_NO_EVICT, ChunkingPolicy.EQUAL_PROGRESS)
        add(loop, running, 3_000)
        loop.step()
        plan = lambda loop=loop: loop.microbatch.plan(loop.next_step, loop.running)  # noqa: E731
        counts.append(calls(plan))
    assert counts[0] == counts[1] < 80


def write_day(path: Path, requests: int) -> Path:
    """Four arrivals a step, of eight tokens each."""
    with path.open("w") as file:
        for i in range(requests):
            line = {"id": f"q{i}", "arrival_step": i // 4, "prompt_tokens": 5, "max_tokens": 8}
            file.write(json.dumps(line) + "\n")
    return path


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        with Workload(path) as workload:
            summary = summarize(workload, SimulationOptions(pages=512))
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert summary.finished == {"length": workload.num_requests}
    return peak


def test_a_longer_day_takes_no_more_memory(tmp_path: Path) -> None:
    """But for eight bytes a line, and as much again while they are sorted."""
    few, many = 1_000, 6_000
    peak_bytes(write_day(tmp_path / "warm.jsonl", 100))
    grown = peak_bytes(write_day(tmp_path / "b.jsonl", many)) - peak_bytes(
        write_day(tmp_path / "a.jsonl", few)
    )
    assert grown < 3 * 8 * (many - few) + 20_000


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(1, 40), st.integers(1, 20), st.sampled_from([None, None, 1, -1])
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=ARRIVALS,
    policy=st.sampled_from(CapacityPolicy),
    chunking=st.sampled_from(ChunkingPolicy),
    pages=st.integers(2, 12),
    overlap=st.booleans(),
)
def test_a_summary_is_that_of_the_steps(
    tmp_path_factory: pytest.TempPathFactory, arrivals: list[tuple[int, int, int, int | None]],
    policy: CapacityPolicy, chunking: ChunkingPolicy, pages: int, overlap: bool,
) -> None:  # fmt: skip
    """`--summary` counts without making steps; some of these requests can never fit."""
    path = tmp_path_factory.mktemp("workload") / "w.jsonl"
    with path.open("w") as file:
        for i, (step, prompt, output, priority) in enumerate(arrivals):
            line = {"id": f"q{i}", "arrival_step": step, "prompt_tokens": prompt, "max_tokens": output}
            file.write(json.dumps(line | ({} if priority is None else {"priority": priority})) + "\n")
    options = SimulationOptions(
        policy=policy, chunking=chunking, pages=pages, tokens_per_page=4, max_batch_size=4, max_num_tokens=8,
        overlap=overlap,
    )  # fmt: skip
    with Workload(path) as workload:
        builder = StepBuilder()
        steps = sum(1 for _ in steps_of(simulate(workload, options), builder))
        summary = summarize(workload, options).as_json()
    assert summary == builder.summary.as_json()
    assert summary["steps"] == steps
