"""Steps as a table of text: requests down, steps across; then why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tapeout.cli.format import WIDTH

if TYPE_CHECKING:
    from tapeout.cli.timeline import Shown
    from tapeout.runtime.trace.steps import StepView
    from tapeout.runtime.trace.tally import Summary

_SHOWN_REQUESTS = 200
_NAME_WIDTH = 24
_LEGEND = (
    "number: context tokens   g: generation   .: waiting   p: paused   -: no rows   |: ends after this step"
)


def table_text(shown: Shown) -> str:
    """The step table in blocks that fit a terminal, and the decisions below it."""
    if not shown.steps:
        return "no steps to show"
    cells = [cells_of(view) for view in shown.steps]
    names = names_in(shown.steps)
    shown_names = names[:_SHOWN_REQUESTS]
    width = max(
        4, *(len(text) for column in cells for text in column.values()), len(str(shown.steps[-1].step))
    )
    label = min(max(4, *(len(name) for name in names)), _NAME_WIDTH)
    per_block = max((WIDTH - label) // (width + 1), 1)
    blocks = []
    for first in range(0, len(cells), per_block):
        part = slice(first, first + per_block)
        blocks.append(_block(shown.steps[part], cells[part], shown_names, label, width))
    lines = ["\n\n".join(block for block in blocks), _LEGEND]
    if len(names) > len(shown_names):
        lines.append(f"{len(names) - len(shown_names):,} more requests are not shown")
    if shown.left_out:
        lines.append(
            f"{shown.left_out:,} more steps are not shown; choose with --steps, or take --json or --html"
        )
    return "\n".join([*lines, "", *_decisions(shown.steps), ""])


def names_in(views: list[StepView]) -> list[str]:
    """Requests that did something in these steps, in order of arrival."""
    names: dict[str, int] = {}
    for view in views:
        for name in cells_of(view):
            names.setdefault(name, view.numbers.get(name, 0))
    return sorted(names, key=names.__getitem__)


def cells_of(view: StepView) -> dict[str, str]:
    """What each request did in the step, by its id."""
    cells = dict.fromkeys(view.held, "-")
    for name, reason in view.held.items():
        if reason.startswith("waiting"):
            cells[name] = "."
        elif reason.startswith("paused"):
            cells[name] = "p"
    cells |= dict.fromkeys(view.resting, "p")
    cells |= dict.fromkeys(view.paused, "p")
    cells |= dict.fromkeys(view.ending, "")
    cells |= {name: str(tokens) for name, _, tokens, _ in view.context}
    cells |= dict.fromkeys(view.generation, "g")
    for name in view.finished:
        cells[name] = cells.get(name, "") + "|"
    return {name: text for name, text in cells.items() if text}


def _block(
    views: list[StepView], cells: list[dict[str, str]], names: list[str], label: int, width: int
) -> str:
    present = {name for column in cells for name in column}
    rows = [("step", [str(view.step) for view in views])]
    rows += [(name, [column.get(name, "") for column in cells]) for name in names if name in present]
    return "\n".join(
        f"{name[:label]:<{label}} {' '.join(f'{text:>{width}}' for text in texts)}".rstrip()
        for name, texts in rows
    )


def _decisions(views: list[StepView]) -> Iterator[str]:
    """A line for each decision; one that is the same in following steps is told once."""
    yield "decisions:"
    spans: dict[tuple[str, str], list[int]] = {}
    order: list[tuple[int, int, str, str]] = []
    for view in views:
        for name, reason in _reasons(view):
            span = spans.get((name, reason))
            if span is not None and span[1] == view.step - 1:
                span[1] = view.step
                continue
            if span is not None:
                order.append((span[0], span[1], name, reason))
            spans[name, reason] = [view.step, view.step]
    order += [(first, last, name, reason) for (name, reason), (first, last) in spans.items()]
    for first, last, name, reason in sorted(order, key=lambda entry: entry[0]):
        yield f"  step {first if first == last else f'{first}-{last}'}: {name}: {reason}"


def _reasons(view: StepView) -> Iterator[tuple[str, str]]:
    yield from view.paused.items()
    yield from view.admitted.items()
    for name, _, reason in view.evicted:
        yield name, reason
    for name, reason in view.held.items():
        if ": behind " not in reason:  # the table shows them
            yield name, reason
    for name, _, _, reason in view.context:
        yield name, reason
    for name, reason in view.finished.items():
        yield name, f"finished: {reason}"


def summary_text(summary: Summary) -> str:
    """The counts, a line for each kind."""
    s = summary.as_json()
    ends = ", ".join(f"{count:,} {reason}" for reason, count in s["finished"].items()) or "none"
    most = f"{s['max_running']:,} running, {s['max_waiting']:,} waiting, {s['max_pages_used']:,} pages used"
    lines = [
        f"requests: {s['requests']:,}; ended: {ends}",
        f"steps: {s['steps']:,}" + (f", {s['first_step']} to {s['last_step']}" if s["steps"] else ""),
        f"tokens: {s['context_tokens']:,} context, {s['output_tokens']:,} output",
        f"pauses: {s['pauses']:,}, {s['recomputed_tokens']:,} tokens computed again",
        *([f"evicted: {s['evicted_pages']:,} cached pages"] if s["evicted_pages"] else []),
        f"most at a time: {most}",
    ]
    if s["mean_queue_steps"] is not None:
        lines.append(
            f"steps in the queue: {s['mean_queue_steps']:,} on average, {s['max_queue_steps']:,} at most"
        )
    lines += [f"refused: {r['id']}: {r['reason']}" for r in s["refused"]]
    return "\n".join(lines)
