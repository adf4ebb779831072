"""What `simulate` and `explain` share: the steps a user wants to see, kept from a stream of steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tapeout.runtime.trace.steps import StepBuilder, StepView
    from tapeout.runtime.trace.tally import Summary

#: Steps shown when the user does not say which: a screenful of text, a wide picture.
SHOWN_TEXT, SHOWN_HTML = 100, 1_000


@dataclass(frozen=True)
class StepRange:
    """Steps from `first` to `last`, both included."""

    first: int
    last: int


def _step_range(context: click.Context, param: click.Parameter, value: str | None) -> StepRange | None:
    """`10-20`, `10-` or `10`."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,15})(?:(-)(\d{1,15})?)?", value.strip())
    if match is None or (match[3] is not None and int(match[3]) < int(match[1])):
        raise click.BadParameter(f"{value!r}, expected steps such as 10-20, 10- or 10", context, param)
    first = int(match[1])
    return StepRange(first, int(match[3]) if match[3] else 10**15 if match[2] else first)


STEPS = click.option(
    "--steps",
    callback=_step_range,
    metavar="FIRST-LAST",
    help=f"Steps to show. [default: the first {SHOWN_TEXT}, HTML {SHOWN_HTML:,}]",
)
HTML = click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a page with a picture of the steps.",
)
JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print all steps and the summary as JSON, nothing else."
)
SUMMARY = click.option(
    "--summary", "summary_only", is_flag=True, help="Print the summary only; of any length."
)


@dataclass
class Shown:
    """The steps to show.

    Attributes:
        steps: those of the range, or the first ones; at most `most`.
        left_out: steps of the range that are not among them.
    """

    chosen: StepRange | None
    most: int
    steps: list[StepView] = field(default_factory=list)
    left_out: int = 0

    def takes(self, step: int) -> bool:
        """Whether a step that comes now will be kept."""
        return self._chosen(step) and len(self.steps) < self.most

    def take(self, view: StepView) -> None:
        if self.takes(view.step):
            self.steps.append(view)
        elif self._chosen(view.step):
            self.left_out += 1

    def _chosen(self, step: int) -> bool:
        return self.chosen is None or self.chosen.first <= step <= self.chosen.last


def show(
    events: Iterable[dict[str, Any]],
    stdout: IO[str],
    *,
    title: str,
    steps: StepRange | None,
    html: Path | None,
    as_json: bool,
    summary_only: bool,
) -> None:
    """Run through the events and print what the user asked for; steps that are not shown are not kept."""
    from tapeout.cli.results import open_output
    from tapeout.cli.timeline_html import page
    from tapeout.cli.timeline_text import table_text
    from tapeout.runtime.trace.steps import StepBuilder, steps_of

    text, picture = Shown(steps, SHOWN_TEXT), Shown(steps, SHOWN_HTML)
    shown = [picture] if html is not None else []
    if not as_json and not summary_only:
        shown.append(text)
    all_steps = as_json and not summary_only
    builder = StepBuilder(lambda step: all_steps or any(s.takes(step) for s in shown))
    views = _each(steps_of(events, builder), shown)
    if all_steps:
        _write_json(views, builder, stdout)
    else:
        for _ in views:
            pass
        if not summary_only:
            stdout.write(table_text(text) + "\n")
        show_summary(builder.summary, stdout, as_json=as_json)
    if html is not None:
        with open_output(html) as stream:
            stream.write(page(picture, builder.summary, title))
        click.echo(f"wrote {html}", err=True)


def show_summary(summary: Summary, stdout: IO[str], *, as_json: bool) -> None:
    """The summary alone."""
    import json

    from tapeout.cli.timeline_text import summary_text

    stdout.write((json.dumps({"summary": summary.as_json()}) if as_json else summary_text(summary)) + "\n")


def _each(views: Iterator[StepView], shown: list[Shown]) -> Iterator[StepView]:
    for view in views:
        for taker in shown:
            taker.take(view)
        yield view


def _write_json(views: Iterator[StepView], builder: StepBuilder, stdout: IO[str]) -> None:
    """`{"steps": [...], "summary": {...}}`, a step on each line as it comes."""
    import json

    stdout.write('{"steps": [')
    separator = "\n"
    for view in views:
        stdout.write(separator + json.dumps(view.as_json()))
        separator = ",\n"
    stdout.write(f'\n], "summary": {json.dumps(builder.summary.as_json())}}}\n')
