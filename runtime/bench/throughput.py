"""Throughput of many requests in flight together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tapeout.plugins.errors import UsageError
from tapeout.runtime.bench.measured_llm import BenchRequest, MeasuredLLM
from tapeout.runtime.bench.metrics import throughput_metrics
from tapeout.runtime.bench.prompts import prompt_ids
from tapeout.runtime.bench.workload import Workload
from tapeout.runtime.engine.manifest import Limits

_SHOWN_PROBLEMS = 10


def random_requests(
    count: int, input_len: int, output_len: int, range_ratio: float, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """Requests of random ids; lengths are drawn from [length * (1 - ratio), length * (1 + ratio)]."""
    rng = np.random.default_rng(seed)

    def lengths(length: int) -> list[int]:
        low, high = int(length * (1 - range_ratio)), int(length * (1 + range_ratio))
        return np.maximum(rng.integers(low, high, count, endpoint=True), 1).tolist()

    pairs = zip(lengths(input_len), lengths(output_len), strict=True)
    return [
        BenchRequest(prompt_ids(seed + i, prompt_len, 0, vocab_size), tokens)
        for i, (prompt_len, tokens) in enumerate(pairs)
    ]


def workload_requests(workload: Workload, count: int | None) -> list[BenchRequest]:
    """The first `count` requests of the workload's mixed point; all of them when None.

    Raises UsageError when it has fewer, or none.
    """
    have = len(workload.mixed)
    if have == 0 or (count or 0) > have:
        raise UsageError(f"workload {workload.name} has {have} mixed requests, expected {count or 'some'}")
    return [BenchRequest(workload.ids(r.seed, r.prompt_len), r.output_len) for r in workload.mixed[:count]]


def poisson_arrivals(requests: Sequence[BenchRequest], rate: float, seed: int) -> list[BenchRequest]:
    """The requests with arrivals of a Poisson process, `rate` requests a second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(requests))
    moments = np.concatenate([[0.0], np.cumsum(gaps)[:-1]])
    return [replace(r, arrival=float(t)) for r, t in zip(requests, moments, strict=True)]


def check_requests(requests: Sequence[BenchRequest], limits: Limits) -> None:
    """UsageError naming requests that are longer than the engine allows."""
    problems = [
        f"request {i}: {r.prompt_len} + {r.output_len} tokens"
        for i, r in enumerate(requests)
        if r.prompt_len + r.output_len > limits.max_seq_len
    ]
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        shown = problems[:_SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise UsageError(
            f"max_seq_len is {limits.max_seq_len}, too short for:\n" + "\n".join(f"  {p}" for p in shown),
            hint="give shorter lengths, or build an engine with a higher --max-seq-len",
        )


def measure_throughput(
    llm: MeasuredLLM,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int | None = None,
    runs: int = 1,
    warmups: int = 0,
) -> dict[str, Any]:
    """Run all requests `runs` times; the figures of the fastest run, and the seconds of every run.

    `warmups`: so many of the requests run before, uncounted, so that no step is recorded or captured
    for the first time while it is measured.
    """
    if warmups:
        llm.run([replace(r, arrival=0.0) for r in requests[:warmups]], max_concurrency=max_concurrency)
    done = [llm.run(requests, max_concurrency=max_concurrency) for _ in range(runs)]
    best = min(done, key=lambda run: run.elapsed)
    return {**throughput_metrics(best), "elapsed_times": [run.elapsed for run in done]}
