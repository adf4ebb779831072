"""`tapeout explain`: what the schedulers decided in a run, and why."""

from __future__ import annotations

from pathlib import Path

import click

from tapeout.cli.paths import check_output
from tapeout.cli.streams import standard_output, writing
from tapeout.cli.timeline import HTML, JSON, STEPS, SUMMARY, StepRange, show


@click.command("explain", short_help="Show what was scheduled in each step, and why.")
@click.argument("trace", type=click.Path(path_type=Path))
@STEPS
@HTML
@JSON
@SUMMARY
def command(
    trace: Path, steps: StepRange | None, html: Path | None, as_json: bool, summary_only: bool
) -> None:
    """Show the steps of TRACE, a file that `tapeout run --trace` or `tapeout simulate --trace` wrote.

    A table of requests and steps, then every decision with its reason.

    \b
    tapeout explain trace.jsonl
    tapeout explain trace.jsonl --steps 100-150 --html steps.html
    """
    from tapeout.runtime.trace.reader import read_trace

    stdout = standard_output()
    if html is not None:
        check_output(html, "--html", inputs=[trace], stream=True)
    with writing():
        show(
            read_trace(trace),
            stdout,
            title=f"Steps of {trace.name}",
            steps=steps,
            html=html,
            as_json=as_json,
            summary_only=summary_only,
        )
