"""Whole records of a benchmark: what it is, its conditions, its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tapeout.runtime.bench.bandwidth import read_bandwidth
from tapeout.runtime.bench.conditions import conditions
from tapeout.runtime.bench.latency import Batch, check_pool, measure_latency
from tapeout.runtime.bench.measured_llm import BenchRequest, MeasuredLLM
from tapeout.runtime.bench.startup import measure_startup, read_into_page_cache, startup_figures
from tapeout.runtime.bench.sweep import KNEE, Sweep, knee, walk
from tapeout.runtime.bench.throughput import measure_throughput
from tapeout.runtime.bench.workload import Workload
from tapeout.runtime.engine import open_engine

#: Takes a line about what is done.
Tell = Callable[[str], None]


def latency_record(
    engine: Path,
    batches: Sequence[Batch],
    *,
    warmup: int,
    measure_bandwidth: bool,
    workload: Workload | None,
    runtime: Mapping[str, Any],
    progress: Tell,
) -> dict[str, Any]:
    """Measure batches and say how. With a single batch its figures stand at the top as well, where
    readers of `vllm bench latency --output-json` look for them.

    `runtime`: arguments of LLM.
    """
    bandwidth = None
    if measure_bandwidth:
        with open_engine(engine, verify=False) as opened:
            bandwidth = read_bandwidth(opened, runtime.get("threads"))  # before weights take the memory
        progress(f"memory reads {bandwidth.bytes_per_second / 1e9:,.1f} GB/s")
    with MeasuredLLM(engine, **runtime) as llm:
        check_pool(batches, llm.engine.manifest.limits, llm.stats().kv_pages_total)
        record: dict[str, Any] = {
            "benchmark": "latency",
            "what": "seconds of a batch from its start to its last token; ms_per_decode_step = (all - first) "
            "/ (output_len - 1), the median over repetitions; new prompts in each; greedy, EOS ignored",
            "conditions": conditions(
                llm.engine,
                {**runtime, **_source(workload), "num_iters_warmup": warmup,
                 "num_iters": {b.name: b.repetitions for b in batches},
                 "kv_cache_pages": llm.stats().kv_pages_total},
            ),
            "read_bandwidth": bandwidth and bandwidth.to_json(),
            "points": [],
        }  # fmt: skip
        for point in measure_latency(llm, batches, warmup=warmup, bandwidth=bandwidth):
            record["points"].append(point)
            progress(f"{point['name']}: {point['avg_latency'] * 1e3:,.2f} ms")
    if len(record["points"]) == 1:
        record |= record["points"][0]
    return record


def throughput_record(
    engine: Path,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int | None,
    request_rate: float | None,
    runs: int,
    warmups: int | None,
    workload: Workload | None,
    dataset: Mapping[str, Any],
    runtime: Mapping[str, Any],
    progress: Tell,
) -> dict[str, Any]:
    """Measure requests in flight together and say how.

    `warmups`: None = twice the batch; `dataset`: how random requests were made; `runtime`: arguments
    of LLM.
    """
    with MeasuredLLM(engine, **runtime) as llm:
        batch = runtime.get("max_batch_size") or llm.engine.manifest.limits.max_batch_size
        warmups = min(2 * batch if warmups is None else warmups, len(requests))
        settings = {
            **runtime, **dataset, **_source(workload), "max_concurrency": max_concurrency,
            "request_rate": request_rate or "inf", "num_runs": runs, "num_warmups": warmups,
            "kv_cache_pages": llm.stats().kv_pages_total,
        }  # fmt: skip
        where = conditions(llm.engine, settings)
        progress(f"{len(requests)} requests, {runs} run(s) after {warmups} warm-up requests")
        figures = measure_throughput(
            llm, requests, max_concurrency=max_concurrency, runs=runs, warmups=warmups
        )
    return {
        "benchmark": "throughput",
        "what": "requests in flight together, from giving the first to the end of the last; the fastest of "
        "num_runs runs; greedy, EOS ignored",
        "conditions": where,
        **figures,
    }


#: Beside every figure of a start that stands next to vLLM's.
PEER_NOTE = (
    "from exec of a new process to its first token, weights read from a file in the page cache; vLLM's "
    "figure (benchmarks/peers/) read no weights, they were random, and had no tokenizer"
)


def startup_record(
    engine: Path, iterations: int, *, input_len: int, seed: int, runtime: Mapping[str, Any], progress: Tell
) -> dict[str, Any]:
    """Start processes one after the other and say how.

    `runtime`: arguments of LLM.
    """
    with open_engine(engine, verify=False) as opened:
        files = opened.files
    read = read_into_page_cache(files)
    progress(f"{read / 1e9:,.2f} GB read into the page cache")
    starts = []
    for start in measure_startup(engine, iterations, input_len=input_len, seed=seed, runtime=runtime):
        starts.append(start)
        progress(f"start {len(starts)}: {start['start_to_first_token']:.3f} s")
    settings = {**runtime, "num_iters": iterations, "input_len": input_len, "seed": seed}
    # Only now: it may open the GPU, and a GPU that a process holds open starts faster for the next one.
    with open_engine(engine, verify=False) as opened:
        where = conditions(opened, {**settings, "bytes_in_page_cache": read})
    return {
        "benchmark": "startup",
        "what": f"seconds {PEER_NOTE}; the medians of num_iters starts",
        "conditions": where,
        **startup_figures(starts),
    }


def sweep_record(
    engine: Path, sweep: Sweep, *, lengths: Mapping[str, Any], runtime: Mapping[str, Any], progress: Tell
) -> dict[str, Any]:
    """Walk an engine's limits and say how.

    `lengths`: how its requests were made; `runtime`: arguments of LLM.
    """
    with MeasuredLLM(engine, **runtime) as llm:
        pages = llm.stats().kv_pages_total
        settings = {**runtime, **lengths, "requests_per_slot": sweep.requests_per_slot}
        where = conditions(llm.engine, {**settings, "kv_cache_pages": pages})
        points = []
        for point in walk(llm, sweep):
            points.append(point)
            progress(
                f"batch {point['max_batch_size']}, {point['max_num_tokens']} tokens a step: "
                f"{point['output_throughput']:,.1f} tokens/s, TPOT {point['median_tpot_ms']:.2f} ms"
            )
    return {
        "benchmark": "sweep",
        "what": "throughput against time per output token, with the two limits of a running engine lowered",
        "knee_definition": KNEE,
        "conditions": where,
        "knee": {name: knee(points)[name] for name in ("max_batch_size", "max_num_tokens")},
        "points": points,
    }


def _source(workload: Workload | None) -> dict[str, Any]:
    return {} if workload is None else {"workload": workload.facts()}
