"""What a step's scheduling costs: admission, plan, room and pages, without packing, executor and reading.

    python benchmarks/planning.py [--sizes 256,2048] [--waiting 10,100000] [--rounds 7]

For every number of running requests and of waiting ones, microseconds of CPU time on one core, as [median,
least] over rounds of 40 steps: on a machine that others use, CPU time grows with their use of its caches
and of the core's other thread, and the least says more about the program (`calibration_us`, before and after,
tells how busy they were: see record.py):

- decode: all of them generate, nobody begins or ends;
- mixed: an eighth of them reads its context, under each chunking policy in turn;
- churn: the same, and in every step one of the running ends, one of those that wait takes its
  slot, and another one comes to wait;
- reuse: churn with the prefix cache on, prompts that share nothing, and a pool full of pages of requests
  that have ended, so that every new page evicts one; and reuse_turn, the whole turn, in which an ended
  request leaves its pages to the cache;
- short: MAX_UTILIZATION without a free page, so that every step pauses the newest; and short_shared, where
  all of them share a prompt of four pages.

The loop and the schedulers are the real ones; the executor does nothing (runtime/simulator). Time of a step
is that of `EngineLoop.step` up to the packing of its inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import record

from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime import loop as loop_module
from tapeout.runtime.engine import Limits
from tapeout.runtime.kv_cache import PrefixCacheOptions
from tapeout.runtime.loop import EngineLoop
from tapeout.runtime.new_loop import SchedulerOptions, new_loop
from tapeout.runtime.scheduler.policies import CapacityPolicy, ChunkingPolicy
from tapeout.runtime.scheduler.request import Finish, Request, RequestTimes
from tapeout.runtime.simulator.executor import ScriptedExecutor
from tapeout.runtime.step import StepInputs

STEPS = 40  # of a round
PER_PAGE = 32
_GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


class NoSink:
    """Takes tokens and keeps nothing."""

    def on_token(self, token_id: int, logprobs: Any, ending: bool) -> None: ...

    def on_tokens(self, token_ids: list[int], ending: bool) -> None: ...

    def on_finish(self, finish: Finish, times: RequestTimes) -> None: ...


class Bench:
    """A loop with some requests running and others waiting."""

    def __init__(
        self,
        running: int,
        waiting: int,
        *,
        capacity: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT,
        chunking: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED,
        in_context: int = 0,
        reuse: bool = False,
        shared: bool = False,
    ) -> None:
        limits = Limits(running, 4 * running, 65_536, PER_PAGE)
        options = SchedulerOptions(
            max_batch_size=running,
            max_num_tokens=limits.max_num_tokens,
            chunk_tokens=2 * PER_PAGE,
            capacity_policy=capacity,
            chunking_policy=chunking,
        )
        pages = 200 * running if reuse else 1 << 20
        executor = ScriptedExecutor(limits, pages)
        cache = PrefixCacheOptions(enable_prefix_reuse=reuse or shared)
        self.loop: EngineLoop = new_loop(executor, options, cache_options=cache)
        self._reuse = reuse
        self._made = 0
        while reuse and self.loop.kv_cache.pool.num_blank > 2_000:
            self.add(60_000, 1)
            while self.loop.step():
                pass
        prefix = 4 * PER_PAGE if shared else 0
        if shared:  # so that the others find it
            self.add(prefix + 1, 1)
            while self.loop.step():
                pass
        for i in range(running):
            self.add(60_000 if i < in_context else prefix + 1 + i % PER_PAGE)
        while not self._settled(running - in_context):
            self.loop.step()
        for _ in range(waiting):
            self.add(1)

    def add(self, prompt: int, max_tokens: int = 4_000) -> None:
        self._made += 1
        name, times = f"q{self._made}", RequestTimes(0.0)
        ids = np.broadcast_to(np.zeros(1, np.int32), prompt)
        if self._reuse:  # nobody shares a page with another
            ids = np.full(prompt, self._made, np.int32)
        self.loop.add(Request(name, ids, _GREEDY, max_tokens, NoSink(), times, watched=False))

    def churn(self) -> None:
        """End the request that runs longest of those that generate; another one comes to wait."""
        running = self.loop.running
        slot = next(s for s in running.order.tolist() if running.output_tokens[s])
        self.loop.abort(running.request(slot).request_id)
        self.add(1)

    def _settled(self, generating: int) -> bool:
        return int((self.loop.running.output_tokens > 2).sum()) >= generating


def planning_us(bench: Bench, rounds: int, before: Callable[[], None] = lambda: None) -> list[float]:
    """CPU microseconds of a step's scheduling: median and least of the rounds."""
    loop, marks = bench.loop, [0.0, 0.0]
    pack = loop_module.pack_step

    def packed(*args: Any) -> StepInputs:
        marks[1] += time.thread_time() - marks[0]
        return pack(*args)

    loop_module.pack_step = packed
    try:
        results = []
        for _ in range(rounds):
            marks[1] = 0.0
            for _ in range(STEPS):
                before()
                marks[0] = time.thread_time()
                loop.step()
            results.append(marks[1] / STEPS * 1e6)
    finally:
        loop_module.pack_step = pack
    return [round(statistics.median(results), 1), round(min(results), 1)]


def turn_us(bench: Bench, rounds: int, before: Callable[[], None]) -> list[float]:
    """CPU microseconds of a whole turn of the loop: median and least of the rounds."""
    results = []
    for _ in range(rounds):
        spent = 0.0
        for _ in range(STEPS):
            before()
            start = time.thread_time()
            bench.loop.step()
            spent += time.thread_time() - start
        results.append(spent / STEPS * 1e6)
    return [round(statistics.median(results), 1), round(min(results), 1)]


def short_us(running: int, waiting: int, rounds: int, *, reuse: bool) -> list[float]:
    """Every step finds the pool one page short of what its rows need."""
    results = []
    for _ in range(rounds):
        bench = Bench(running, waiting, capacity=CapacityPolicy.MAX_UTILIZATION, shared=reuse)
        kv_cache = bench.loop.kv_cache

        def take_all(kv_cache: Any = kv_cache) -> None:
            kv_cache._cache.allocate(kv_cache.num_free)  # what paused requests left to the cache, too

        results += planning_us(bench, 1, take_all)[:1]
        assert bench.loop.stats().pauses > 0
    return [round(statistics.median(results), 1), min(results)]


def measure(running: int, waiting: int, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"running": running, "waiting": waiting}
    for capacity in (CapacityPolicy.GUARANTEED_NO_EVICT, CapacityPolicy.MAX_UTILIZATION):
        row[f"decode_us_{capacity.value}"] = planning_us(Bench(running, waiting, capacity=capacity), rounds)
        bench = Bench(running, waiting, capacity=capacity)
        row[f"churn_us_{capacity.value}"] = planning_us(bench, rounds, bench.churn)
    for chunking in ChunkingPolicy:
        bench = Bench(running, waiting, chunking=chunking, in_context=running // 8)
        row[f"mixed_us_{chunking.value}"] = planning_us(bench, rounds)
    bench = Bench(running, waiting, reuse=True)
    row["reuse_us"] = planning_us(bench, rounds, bench.churn)
    row["reuse_turn_us"] = turn_us(bench, rounds, bench.churn)
    assert bench.loop.kv_cache.stats().evicted_pages > 0
    row["short_us"] = short_us(running, waiting, rounds, reuse=False)
    row["short_shared_us"] = short_us(running, waiting, rounds, reuse=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="256,2048")
    parser.add_argument("--waiting", default="10,100000")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--name", default="planning", help="of the record")
    args = parser.parse_args()
    rows, conditions = [], record.conditions(threads=1)  # of the code that is loaded now
    for running in map(int, args.sizes.split(",")):
        for waiting in map(int, args.waiting.split(",")):
            calibration = record.calibration_us()
            rows.append(measure(running, waiting, args.rounds))
            rows[-1]["calibration_us"] = [calibration, record.calibration_us()]
            print(json.dumps(rows[-1]), flush=True)
    record.write(
        args.name,
        {
            "what": "scheduling of a step in us of CPU time: admission, plan, room, pages",
            "budget_us": {"256": 300, "2048": 1000},
            "conditions": conditions,
            "settings": {"rounds": args.rounds, "steps": STEPS, "tokens_per_page": PER_PAGE},
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
