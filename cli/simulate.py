"""`tapeout simulate`: the schedulers at work on a workload, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click

from tapeout.cli.paths import check_output
from tapeout.cli.run_options import CAPACITY_POLICIES, CHUNKING_POLICIES
from tapeout.cli.streams import standard_output, writing
from tapeout.cli.timeline import HTML, JSON, STEPS, SUMMARY, StepRange, show, show_summary

COUNT = click.IntRange(min=1)


@click.command("simulate", short_help="Run the schedulers on a workload, without a model.")
@click.argument("workload", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "--capacity-policy",
    type=CAPACITY_POLICIES,
    default="guaranteed_no_evict",
    show_default=True,
    help="When a waiting request may hold pages.",
)
@click.option(
    "--chunking",
    "--chunking-policy",
    type=CHUNKING_POLICIES,
    default="first_come_first_served",
    show_default=True,
    help="How requests in context share a step.",
)
@click.option("--pages", type=COUNT, default=65_536, show_default=True, help="KV pages of the pool.")
@click.option("--tokens-per-page", type=COUNT, default=32, show_default=True, help="Tokens a page holds.")
@click.option("--max-batch-size", type=COUNT, default=64, show_default=True, help="Most requests in flight.")
@click.option("--max-num-tokens", type=COUNT, default=2_048, show_default=True, help="Most tokens in a step.")
@click.option("--chunk-tokens", type=COUNT, help="Most context tokens of one request in a step.")
@click.option(
    "--overlap/--no-overlap",
    default=True,
    show_default=True,
    help="Plan a step before the one before it is read, as engines do; or take turns.",
)
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Write the trace, too.")
@STEPS
@HTML
@JSON
@SUMMARY
def command(
    workload: Path,
    trace: Path | None,
    steps: StepRange | None,
    html: Path | None,
    as_json: bool,
    summary_only: bool,
    **options: Any,
) -> None:
    """Schedule the requests of WORKLOAD step by step and show what ran when, and why.

    A line of WORKLOAD is {"id": "R1", "arrival_step": 0, "prompt_tokens": 16, "max_tokens": 4}, with
    "priority" if wanted. The loop and its schedulers are those of `tapeout run`; the executor does nothing.

    \b
    tapeout simulate workload.jsonl --policy MAX_UTILIZATION --pages 400
    tapeout simulate workload.jsonl --no-overlap --json
    tapeout simulate day.jsonl --summary
    """
    from tapeout.runtime.scheduler.policies import CapacityPolicy, ChunkingPolicy
    from tapeout.runtime.simulator.simulate import SimulationOptions, simulate, summarize
    from tapeout.runtime.simulator.workload import Workload

    options["policy"] = CapacityPolicy(options["policy"])
    options["chunking"] = ChunkingPolicy(options["chunking"])
    checked = SimulationOptions(**options)
    stdout = standard_output()
    for path, name in ((html, "--html"), (trace, "--trace")):
        if path is not None:
            check_output(path, name, inputs=[workload], stream=True)
    if summary_only and html is None and trace is None:
        with Workload(workload) as requests, writing():
            show_summary(summarize(requests, checked), stdout, as_json=as_json)
        return
    with Workload(workload) as requests, _written(simulate(requests, checked), trace) as events, writing():
        show(
            events,
            stdout,
            title=f"Simulation of {workload.name}",
            steps=steps,
            html=html,
            as_json=as_json,
            summary_only=summary_only,
        )


@contextmanager
def _written(events: Iterator[dict[str, Any]], trace: Path | None) -> Iterator[Iterator[dict[str, Any]]]:
    """The events, each written to the trace before it is seen."""
    if trace is None:
        yield events
        return
    from tapeout.runtime.trace.writer import open_trace

    writer = open_trace(trace)

    def each() -> Iterator[dict[str, Any]]:
        for event in events:
            writer.take(event)
            yield event

    with closing(writer):
        yield each()
