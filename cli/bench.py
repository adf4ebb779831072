"""`tapeout bench`: measure an engine. Each command calls functions of runtime/bench/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tapeout.cli import run_options
from tapeout.cli.bench_options import (
    COUNT,
    NO_ROOFLINE,
    NUMBER,
    OUTPUT,
    RATIO,
    SEED,
    WORKLOAD,
    counts,
    excludes,
    given,
    names,
    open_manifest,
    publish,
    tell,
)
from tapeout.cli.engine_argument import chooses_engine, engine_argument


@click.group("bench", short_help="Measure an engine.")
def command() -> None:
    """Measure an engine: latency, throughput, start, and the knee between throughput and latency.

    Records are JSON with the field names of vLLM's benchmarks, and say when, where and how they were
    made. Decoding is greedy and goes on after an end-of-sequence token.

    \b
    tapeout bench latency model.engine --batch-size 1,8
    tapeout bench throughput model.engine --num-prompts 200
    """


@command.command("latency", short_help="Time of a batch, its first token and its steps.")
@engine_argument
@click.option(
    "--batch-size",
    callback=counts,
    metavar="COUNTS",
    default="1",
    show_default=True,
    help="Sizes, such as 1,8,32.",
)
@click.option("--input-len", type=COUNT, default=128, show_default=True, help="Tokens of a prompt.")
@click.option("--output-len", type=COUNT, default=128, show_default=True, help="Tokens to generate.")
@WORKLOAD
@click.option(
    "--points", callback=names, metavar="NAMES", help="Points of the workload, such as decode-8,prefill-2048."
)
@click.option(
    "--num-iters-warmup", type=NUMBER, default=1, show_default=True, help="Uncounted runs of a batch."
)
@click.option("--num-iters", type=COUNT, help="Counted runs. [default: 5; workload: decode 3, prefill 7]")
@SEED
@NO_ROOFLINE
@run_options.apply(run_options.RUNTIME)
@run_options.apply(OUTPUT)
@chooses_engine
def latency(
    engine: Path,
    batch_size: tuple[int, ...],
    input_len: int,
    output_len: int,
    workload: Path | None,
    points: tuple[str, ...],
    num_iters_warmup: int,
    num_iters: int | None,
    seed: int,
    no_roofline: bool,
    output: Path | None,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run batches of equal lengths through ENGINE, each with new prompts.

    ms/step is (time of all tokens - time of the first) / (tokens - 1), the median over runs. The
    roofline is the time it takes to read weights and KV cache once at the memory's measured bandwidth.

    \b
    tapeout bench latency model.engine --batch-size 1,8 --input-len 128 --output-len 256
    tapeout bench latency model.engine --workload workload.json -o latency.json
    """
    from tapeout.cli.bench_text import latency_text
    from tapeout.runtime.bench.latency import check_batches, random_batches, workload_batches
    from tapeout.runtime.bench.records import latency_record
    from tapeout.runtime.bench.workload import pick, read_workload

    manifest = open_manifest(engine, output, force, [workload])
    vocab_size, read = manifest.model.vocab_size, None
    if workload is not None:
        excludes("--workload", batch_size=0, input_len=0, output_len=0, seed=0)
        read = read_workload(workload, vocab_size)
        batches = workload_batches(read, pick(read.points, points), num_iters)
    else:
        if points:
            raise click.UsageError("--points needs --workload: a workload file names the points.")
        batches = random_batches(
            batch_size, input_len, output_len, repetitions=num_iters or 5, vocab_size=vocab_size, seed=seed
        )
    check_batches(batches, manifest.limits, flags["max_batch_size"])
    record = latency_record(
        engine,
        batches,
        warmup=num_iters_warmup,
        measure_bandwidth=not no_roofline,
        workload=read,
        runtime=given(flags),
        progress=lambda line: tell(line, as_json),
    )
    publish(record, latency_text, output, as_json)


@command.command("throughput", short_help="Tokens a second with many requests in flight.")
@engine_argument
@click.option(
    "--dataset",
    "--dataset-name",
    type=click.Choice(["random"]),
    default="random",
    show_default=True,
    help="Where prompts come from.",
)
@click.option("--input-len", type=COUNT, default=512, show_default=True, help="Mean tokens of a prompt.")
@click.option("--output-len", type=COUNT, default=128, show_default=True, help="Mean tokens to generate.")
@click.option(
    "--range-ratio",
    type=RATIO,
    default=0.0,
    show_default=True,
    help="Lengths vary by this share.",
)
@WORKLOAD
@click.option("--num-prompts", type=COUNT, help="Requests. [default: 100; workload: all]")
@click.option("--max-concurrency", type=COUNT, help="Most requests given to the engine at a time.")
@click.option(
    "--request-rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests a second, Poisson arrivals. [default: all at once]",
)
@click.option("--num-warmups", type=NUMBER, help="Uncounted requests before. [default: 2 * max_batch_size]")
@click.option("--num-runs", type=COUNT, default=1, show_default=True, help="Runs; the fastest counts.")
@SEED
@run_options.apply(run_options.RUNTIME)
@run_options.apply(OUTPUT)
@chooses_engine
def throughput(
    engine: Path,
    dataset: str,
    input_len: int,
    output_len: int,
    range_ratio: float,
    workload: Path | None,
    num_prompts: int | None,
    max_concurrency: int | None,
    request_rate: float | None,
    num_warmups: int | None,
    num_runs: int,
    seed: int,
    output: Path | None,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run many requests through ENGINE, batched in flight.

    \b
    tapeout bench throughput model.engine --input-len 512 --output-len 128 --num-prompts 200
    tapeout bench throughput model.engine --workload workload.json --num-runs 2 -o mixed.json
    """
    from tapeout.cli.bench_text import throughput_text
    from tapeout.runtime.bench.records import throughput_record
    from tapeout.runtime.bench.throughput import (
        check_requests,
        poisson_arrivals,
        random_requests,
        workload_requests,
    )
    from tapeout.runtime.bench.workload import read_workload

    manifest = open_manifest(engine, output, force, [workload])
    vocab_size, read = manifest.model.vocab_size, None
    if workload is not None:
        excludes("--workload", dataset=0, input_len=0, output_len=0, range_ratio=0)
        read = read_workload(workload, vocab_size)
        requests = workload_requests(read, num_prompts)
    else:
        requests = random_requests(num_prompts or 100, input_len, output_len, range_ratio, vocab_size, seed)
    check_requests(requests, manifest.limits)
    if request_rate is not None:
        requests = poisson_arrivals(requests, request_rate, seed)
    settings = {"dataset": dataset, "input_len": input_len, "output_len": output_len,
                "range_ratio": range_ratio, "seed": seed}  # fmt: skip
    record = throughput_record(
        engine,
        requests,
        max_concurrency=max_concurrency,
        request_rate=request_rate,
        runs=num_runs,
        warmups=num_warmups,
        workload=read,
        dataset={} if read else settings,
        runtime=given(flags),
        progress=lambda line: tell(line, as_json),
    )
    publish(record, throughput_text, output, as_json)


@command.command("startup", short_help="Seconds from exec to the first token.")
@engine_argument
@click.option("--num-iters", type=COUNT, default=5, show_default=True, help="Processes to start.")
@click.option("--input-len", type=COUNT, default=128, show_default=True, help="Tokens of the prompt.")
@SEED
@run_options.apply(run_options.RUNTIME)
@run_options.apply(OUTPUT)
@chooses_engine
def startup(
    engine: Path,
    num_iters: int,
    input_len: int,
    seed: int,
    output: Path | None,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Start ENGINE in new processes, one after the other, and time each part up to the first token.

    The files are read once before, so that they are in the page cache. Figures of other systems may have
    read no weights at all or had no tokenizer: compare with care.

    \b
    tapeout bench startup model.engine --num-iters 5 -o startup.json
    """
    from tapeout.cli.bench_text import startup_text
    from tapeout.runtime.bench.records import startup_record

    manifest = open_manifest(engine, output, force)
    if input_len >= manifest.limits.max_seq_len:
        raise click.UsageError(
            f"--input-len {input_len} and a token do not fit into max_seq_len {manifest.limits.max_seq_len}."
        )
    record = startup_record(
        engine,
        num_iters,
        input_len=input_len,
        seed=seed,
        runtime=given(flags),
        progress=lambda line: tell(line, as_json),
    )
    publish(record, startup_text, output, as_json)


@command.command("sweep", short_help="The knee of throughput against latency.")
@engine_argument
@click.option(
    "--batch-sizes", callback=counts, metavar="COUNTS", help="max_batch_size to try, such as 8,16,32."
)
@click.option(
    "--num-tokens", callback=counts, metavar="COUNTS", help="max_num_tokens to try, such as 512,2048."
)
@click.option("--input-len", type=COUNT, default=128, show_default=True, help="Mean tokens of a prompt.")
@click.option(
    "--output-len",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Mean tokens to generate.",
)
@click.option("--range-ratio", type=RATIO, default=0.5, show_default=True, help="Lengths vary by this share.")
@click.option(
    "--requests-per-slot", type=COUNT, default=3, show_default=True, help="Requests: batch times this."
)
@SEED
@run_options.apply(tuple(o for o in run_options.RUNTIME if o not in run_options.LIMITS))
@run_options.apply(OUTPUT)
@chooses_engine
def sweep(
    engine: Path,
    batch_sizes: tuple[int, ...] | None,
    num_tokens: tuple[int, ...] | None,
    input_len: int,
    output_len: int,
    range_ratio: float,
    requests_per_slot: int,
    seed: int,
    output: Path | None,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run ENGINE with lower limits: at most so many requests in flight and so many tokens in a step.

    Without lists, batch sizes double up to the knee, then tokens a step are halved at that batch size. With
    both lists, every combination is measured. The knee has the most tokens a second for its time per token.

    \b
    tapeout bench sweep model.engine
    tapeout bench sweep model.engine --batch-sizes 32,64,128 --num-tokens 1024,2048 -o sweep.json
    """
    from tapeout.cli.bench_text import sweep_text
    from tapeout.runtime.bench.records import sweep_record
    from tapeout.runtime.bench.sweep import Sweep, check_sweep
    from tapeout.runtime.bench.throughput import random_requests

    manifest = open_manifest(engine, output, force)
    lengths: dict[str, Any] = {"input_len": input_len, "output_len": output_len, "range_ratio": range_ratio}
    walked = Sweep(
        batch_sizes,
        num_tokens,
        requests_per_slot,
        lambda count, number: random_requests(
            count, **lengths, vocab_size=manifest.model.vocab_size, seed=seed + number * 1_000_000
        ),
    )
    check_sweep(walked, manifest.limits, **lengths)
    record = sweep_record(
        engine,
        walked,
        lengths={**lengths, "seed": seed},
        runtime=given(flags),
        progress=lambda line: tell(line, as_json),
    )
    publish(record, sweep_text, output, as_json)
