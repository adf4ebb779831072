"""The host's work per step, without a device: plan, pages, packing, the step's check, metadata, reading ids.

    python benchmarks/host_step.py [--sizes 1,64,256,512,1024,2048] [--gpu] [--name host_step] [--out DIR]

For every number of running requests, microseconds of CPU time of the one thread that does it all:

- loop: one turn of `EngineLoop` while all of them decode and none ends, tokens handed to nobody;
- llm: the same turn as `LLM.generate` makes it, for requests that will have texts and results;
- generate: what `LLM.generate` takes in all for each further token of 128: turns, pages that all grow in
  the same step, and at the end texts and results of all;
- churn: a step of a run in which requests of many lengths end and others take their slots;
- request: what a request costs besides its steps, from its check to the result of one token;
- parts: where a turn's time goes, in wall time with a timer around each part (which adds to it).

Each is the median over rounds. The engine has no kernels and its driver does nothing (host_engine.py);
with --gpu the driver is the real one, so that its calls are included.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from host_engine import HostEngine, host_engine

from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime import loop as loop_module
from tapeout.runtime.engine import Limits
from tapeout.runtime.executors.cuda.replay import Replay
from tapeout.runtime.executors.cuda.sampled_ids import QueuedStep, SampledIds
from tapeout.runtime.executors.cuda.step_buffers import StepBuffers
from tapeout.runtime.executors.step_check import StepChecker
from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.loop import EngineLoop
from tapeout.runtime.scheduler.microbatch import MicroBatchScheduler
from tapeout.runtime.scheduler.request import Finish, Request, RequestTimes

LIMITS = Limits(max_batch_size=2048, max_num_tokens=8192, max_seq_len=1024, tokens_per_page=32)
PROMPT_TOKENS = 32
TURNS_PER_ROUND = 40
OUTPUT_TOKENS = 129  # of a request of `generate`
#: Parts of a turn, by the function that does each.
PARTS: dict[str, tuple[Any, str]] = {
    "plan": (MicroBatchScheduler, "plan"),
    "pages": (KvCache, "grow"),
    "pack": (loop_module, "pack_step"),
    "check": (StepChecker, "check"),
    "bucket": (Replay, "bucket"),
    "metadata": (StepBuffers, "write"),
    "launch": (Replay, "launch"),
    "queued": (SampledIds, "queued"),
    "read_ids": (QueuedStep, "result"),
    "hand_out": (EngineLoop, "_hand_out"),
}


class NoSink:
    """Takes tokens and keeps nothing."""

    def on_token(self, token_id: int, logprobs: Any, ending: bool) -> None: ...

    def on_tokens(self, token_ids: list[int], ending: bool) -> None: ...

    def on_finish(self, finish: Finish, times: RequestTimes) -> None: ...


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def prompts(count: int) -> list[list[int]]:
    rows: list[list[int]] = np.random.default_rng(2).integers(1, 4000, (count, PROMPT_TOKENS)).tolist()
    return rows


@contextmanager
def decoding(llm: LLM, size: int, sinks: bool) -> Iterator[Callable[[], Any]]:
    """`size` requests that all decode; gives the function that makes a turn. `sinks`: texts are wanted."""
    # Prompts of different lengths: pages are added at different steps.
    asked = [ids[: 1 + i % PROMPT_TOKENS] for i, ids in enumerate(prompts(size))]
    loop, turn = llm._loop, llm._turn if sinks else llm._loop.step
    if sinks:
        names = [c.request_id for c in llm._add(asked, greedy(900))]
    else:
        names = [f"bench-{i}" for i in range(size)]
        for name, ids in zip(names, asked, strict=True):
            prompt, times = np.array(ids, np.int32), RequestTimes(loop.clock())
            loop.add(Request(name, prompt, greedy(900), 900, NoSink(), times, watched=False))
    while loop.stats().num_requests_waiting or not all(loop.running.output_tokens[:size] > 4):
        turn()
    yield turn
    for name in names:
        loop.abort(name)
    while loop.step():
        pass


def turn_us(turn: Callable[[], Any], rounds: int) -> float:
    def one_round() -> float:
        start = time.thread_time()
        for _ in range(TURNS_PER_ROUND):
            turn()
        return (time.thread_time() - start) / TURNS_PER_ROUND * 1e6

    return statistics.median(one_round() for _ in range(rounds))


def parts_us(turn: Callable[[], Any]) -> dict[str, float]:
    """Median wall time of each part, and of a whole turn while they are timed."""
    times: dict[str, list[float]] = {name: [] for name in (*PARTS, "turn")}
    undo = [_timed(owner, name, times[part]) for part, (owner, name) in PARTS.items()]
    try:
        for _ in range(4 * TURNS_PER_ROUND):
            start = time.perf_counter()
            turn()
            times["turn"].append(time.perf_counter() - start)
    finally:
        for put_back in undo:
            put_back()
    return {part: round(statistics.median(t) * 1e6, 1) for part, t in times.items()}


def _timed(owner: Any, name: str, times: list[float]) -> Callable[[], None]:
    """Put a timer around a function; returns what takes it away."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        times.append(time.perf_counter() - start)
        return result

    setattr(owner, name, timed)
    return lambda: setattr(owner, name, function)


def generate_us(llm: LLM, size: int, rounds: int) -> tuple[float, float]:
    """Per step after the first, and per request of one token."""

    def run(max_tokens: int) -> float:
        asked = prompts(size)
        start = time.thread_time()
        outputs = llm.generate(asked, greedy(max_tokens))
        elapsed = time.thread_time() - start
        assert all(len(o.outputs[0].token_ids) == max_tokens for o in outputs)
        return elapsed * 1e6

    run(2)
    pairs = [(run(1), run(OUTPUT_TOKENS)) for _ in range(rounds)]
    step = statistics.median((long - short) / (OUTPUT_TOKENS - 1) for short, long in pairs)
    return step, statistics.median(short for short, _ in pairs) / size


def churn_us(llm: LLM, size: int) -> tuple[float, float]:
    """Per step where requests of 64 to 192 tokens follow each other in `size` slots, and ends per step."""
    count = 4 * size if size > 1 else 16
    lengths = np.random.default_rng(3).integers(64, 193, count).tolist()
    asked, params, before = prompts(count), [greedy(n) for n in lengths], llm.stats()
    start = time.thread_time()
    llm.generate(asked, params)
    elapsed, after = time.thread_time() - start, llm.stats()
    steps = after.steps - before.steps
    return elapsed / steps * 1e6, (after.requests_finished - before.requests_finished) / steps


def measure(engine: HostEngine, size: int, rounds: int, gpu: bool) -> dict[str, Any]:
    llm_of = engine.on_gpu if gpu else engine.on_idle_driver
    with llm_of(max_batch_size=size) as llm:
        with decoding(llm, size, sinks=False) as turn:
            loop_turn, parts = turn_us(turn, rounds), parts_us(turn)
        with decoding(llm, size, sinks=True) as turn:
            llm_turn = turn_us(turn, rounds)
        step, request = generate_us(llm, size, rounds)
        churn, ends = churn_us(llm, size)
    return {
        "running": size,
        "loop_us": round(loop_turn, 1),
        "llm_us": round(llm_turn, 1),
        "generate_us": round(step, 1),
        "churn_us": round(churn, 1),
        "churn_ends_per_step": round(ends, 2),
        "request_us": round(request, 1),
        "parts_us": parts,
    }


def conditions() -> dict[str, Any]:
    try:
        import record

        return record.conditions(threads=1)
    except ImportError:  # a machine with the runtime alone
        cpu = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name"))
        return {
            "date": datetime.date.today().isoformat(),
            "cpu": cpu.partition(": ")[2],
            "cores": os.cpu_count(),
            "load_average": [round(x, 2) for x in os.getloadavg()],
            "python": platform.python_version(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1,64,256,512,1024,2048")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gpu", action="store_true", help="the real driver, on a GPU")
    parser.add_argument("--name", default="host_step", help="of the record")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    rows = []
    with host_engine(LIMITS) as engine:
        for size in map(int, args.sizes.split(",")):
            rows.append(measure(engine, size, args.rounds, args.gpu))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "what": "host work per step in us of CPU time, all on one thread; parts in us of wall time",
        "conditions": conditions(),
        "settings": {
            "driver": "real" if args.gpu else "idle",
            "limits": vars(LIMITS),
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "rounds": args.rounds,
            "turns": TURNS_PER_ROUND,
        },
        "sizes": rows,
    }
    args.out.mkdir(exist_ok=True)
    path = args.out / f"{args.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
