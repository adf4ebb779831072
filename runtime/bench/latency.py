"""Latency of batches: all tokens, the first one, and each step after it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.plugins.errors import UsageError
from tapeout.runtime.bench.bandwidth import Bandwidth
from tapeout.runtime.bench.measured_llm import BenchRequest, MeasuredLLM, Run
from tapeout.runtime.bench.metrics import latency_percentiles
from tapeout.runtime.bench.prompts import prompt_ids
from tapeout.runtime.bench.roofline import roofline
from tapeout.runtime.bench.workload import Point, Workload
from tapeout.runtime.engine import Engine
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.kv_cache import pages_for

#: Repetitions of a workload's points where the user gives none, as in `benchmarks/peers/`.
REPETITIONS = {"decode": 3, "prefill": 7}
_BATCH_SEED = 1_000_000  # batches of different sizes share no prompts


@dataclass(frozen=True)
class Batch:
    """A point to measure: requests of equal lengths that start together. Lengths in tokens."""

    name: str
    size: int
    input_len: int
    output_len: int
    repetitions: int
    #: The requests of repetition n, new prompts in each.
    requests: Callable[[int], list[BenchRequest]]


def random_batches(
    sizes: Sequence[int], input_len: int, output_len: int, *, repetitions: int, vocab_size: int, seed: int
) -> list[Batch]:
    """Batches of random ids."""

    def requests(size: int) -> Callable[[int], list[BenchRequest]]:
        first = seed + size * _BATCH_SEED
        return lambda n: [
            BenchRequest(prompt_ids(first + n * size + row, input_len, 0, vocab_size), output_len)
            for row in range(size)
        ]

    return [Batch(f"batch-{s}", s, input_len, output_len, repetitions, requests(s)) for s in sizes]


def workload_batches(workload: Workload, points: Sequence[Point], repetitions: int | None) -> list[Batch]:
    """The workload's points, each repeated as often as given or as REPETITIONS says."""

    def requests(point: Point) -> Callable[[int], list[BenchRequest]]:
        return lambda n: [
            BenchRequest(workload.ids(seed, point.prompt_len), point.output_len) for seed in point.seeds(n)
        ]

    return [
        Batch(p.name, p.batch, p.prompt_len, p.output_len, repetitions or REPETITIONS[p.kind], requests(p))
        for p in points
    ]


def check_batches(batches: Sequence[Batch], limits: Limits, max_batch_size: int | None) -> None:
    """UsageError naming every batch that cannot run as one with an engine of these limits."""
    most = max_batch_size or limits.max_batch_size
    problems = []
    for batch in batches:
        if batch.size > most:
            problems.append(f"{batch.name}: {batch.size} requests, max_batch_size is {most}")
        if batch.input_len + batch.output_len > limits.max_seq_len:
            problems.append(
                f"{batch.name}: {batch.input_len} + {batch.output_len} tokens, "
                f"max_seq_len is {limits.max_seq_len}"
            )
    if problems:
        raise UsageError(
            "the engine cannot run:\n" + "\n".join(f"  {p}" for p in problems),
            hint="choose other points or lengths, or build an engine with higher limits",
        )


def check_pool(batches: Sequence[Batch], limits: Limits, num_pages: int) -> None:
    """UsageError naming every batch that the KV pool cannot hold at once: it would not be one batch."""
    per_page = limits.tokens_per_page
    problems = [
        f"{b.name}: {need} KV pages of {per_page} tokens, the pool has {num_pages}"
        for b in batches
        if (need := b.size * pages_for(b.input_len + b.output_len, per_page)) > num_pages
    ]
    if problems:
        raise UsageError(
            "the KV cache cannot hold a whole batch of:\n" + "\n".join(f"  {p}" for p in problems),
            hint="give --kv-cache-tokens, or choose other points or lengths",
        )


def measure_latency(
    llm: MeasuredLLM, batches: Sequence[Batch], *, warmup: int, bandwidth: Bandwidth | None
) -> Iterator[dict[str, Any]]:
    """One point after the other, as `point_result` describes it.

    `warmup` runs of a batch are not counted; they have prompts of their own.
    """
    for batch in batches:
        for n in range(warmup):
            llm.run(batch.requests(batch.repetitions + n))
        runs = [llm.run(batch.requests(n)) for n in range(batch.repetitions)]
        yield point_result(batch, runs, llm.engine, bandwidth)


def point_result(
    batch: Batch, runs: Sequence[Run], engine: Engine, bandwidth: Bandwidth | None
) -> dict[str, Any]:
    """A point's figures. `avg_latency`, `latencies` and `percentiles` are those of `vllm bench latency`.

    `first_token_latencies`: seconds until every request of the batch had its first token.
    `ms_per_decode_step`: (time of all tokens - time of the first) / (output_len - 1), the median over
    repetitions; None, as the roofline, when one token is generated.
    """
    latencies = [run.elapsed for run in runs]
    first = [run.first_token_seconds for run in runs]
    result: dict[str, Any] = {
        "name": batch.name,
        "batch_size": batch.size,
        "input_len": batch.input_len,
        "output_len": batch.output_len,
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": latency_percentiles(latencies),
        "first_token_latencies": first,
        "median_ttft_ms": statistics.median(r.ttft for run in runs for r in run.requests) * 1e3,
        "ms_per_decode_step": None,
        "output_tokens_per_second": batch.size * batch.output_len / statistics.median(latencies),
        "roofline": None,
    }
    if batch.output_len > 1:
        steps = batch.output_len - 1
        ms = statistics.median((a - f) / steps * 1e3 for a, f in zip(latencies, first, strict=True))
        result["ms_per_decode_step"] = ms
        if bandwidth is not None:
            lengths = (batch.size, batch.input_len, batch.output_len)
            result["roofline"] = roofline(engine, bandwidth, *lengths, ms)
    return result
