"""Steps as one HTML page with a picture of them; nothing is loaded from elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from tapeout.cli.timeline_text import names_in, summary_text

if TYPE_CHECKING:
    from tapeout.cli.timeline import Shown
    from tapeout.runtime.trace.steps import StepView
    from tapeout.runtime.trace.tally import Summary

_STEP, _ROW, _GAP = 14, 18, 2  # pixels
_LABEL, _HEADER = 150, 22
_SHOWN_REQUESTS = 1_000
_KINDS = {
    "context": ("#2f6db5", "context tokens"),
    "generation": ("#5aa469", "generation"),
    "waiting": ("#d9d9d9", "waiting"),
    "paused": ("#e0913a", "paused"),
    "idle": ("#f1e2a8", "running, but no rows in this step"),
}
_STYLE = (
    "body{font:14px sans-serif;margin:1.5em}svg text{font:11px sans-serif}table{border-collapse:collapse}"
    "td,th{padding:1px 8px;text-align:left;font-size:12px;vertical-align:top}pre{font-size:12px}"
    ".key{display:inline-block;width:12px;height:12px;margin:0 4px 0 14px}"
)


def page(shown: Shown, summary: Summary, title: str) -> str:
    """The whole page."""
    keys = "".join(
        f'<span class="key" style="background:{color}"></span>{escape(text)}'
        for color, text in _KINDS.values()
    )
    more = f"<p>{shown.left_out:,} more steps are not shown.</p>" if shown.left_out else ""
    settings = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>"
        for name, value in summary.settings.items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n<p>{keys}</p>\n{_picture(shown.steps)}\n"
        f"{more}<pre>{escape(summary_text(summary))}</pre>\n<h2>Settings</h2><table>{settings}</table>\n"
        f"<h2>Decisions</h2>{_decisions(shown.steps)}\n</body></html>\n"
    )


def _picture(views: list[StepView]) -> str:
    """A row for each request, a column for each step; following steps of one kind are one bar."""
    names = names_in(views)
    rows = {name: row for row, name in enumerate(names[:_SHOWN_REQUESTS])}
    width, height = _LABEL + len(views) * _STEP + 20, _HEADER + len(rows) * _ROW + 10
    size = f'width="{width}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="requests by step">']
    every = max(1, 60 // _STEP)
    for column, view in enumerate(views):
        if column % every == 0:
            parts.append(f'<text x="{_LABEL + column * _STEP}" y="14">{view.step}</text>')
    parts += [
        f'<text x="0" y="{_HEADER + row * _ROW + 12}">{escape(name[:22])}</text>'
        for name, row in rows.items()
    ]
    open_bars: dict[str, dict[str, Any]] = {}
    for column, view in enumerate(views):
        for name, (kind, detail) in _kinds(view).items():
            bar = open_bars.get(name)
            # Each chunk of context is a bar of its own, so that its size can be read.
            if bar and bar["kind"] == kind and bar["end"] == column and kind != "context":
                bar["end"], bar["last"] = column + 1, view.step
                continue
            if bar and name in rows:
                parts.append(_bar(name, rows[name], bar))
            open_bars[name] = {
                "kind": kind, "detail": detail, "start": column, "end": column + 1,
                "first": view.step, "last": view.step,
            }  # fmt: skip
    parts += [_bar(name, rows[name], bar) for name, bar in open_bars.items() if name in rows]
    for column, view in enumerate(views):
        x = _LABEL + (column + 1) * _STEP - _GAP
        parts += [
            f'<path d="M{x} {_HEADER + rows[name] * _ROW}v{_ROW - 4}" stroke="#000" stroke-width="2">'
            f"<title>{escape(name)} ends in step {view.step}: {escape(reason)}</title></path>"
            for name, reason in view.finished.items()
            if name in rows
        ]
    if len(names) > len(rows):
        parts.append(f'<text x="0" y="{height - 1}">{len(names) - len(rows):,} more requests</text>')
    return "".join([*parts, "</svg>"])


def _kinds(view: StepView) -> dict[str, tuple[str, str]]:
    """The kind of bar each request has in the step, and what to say about it."""
    kinds: dict[str, tuple[str, str]] = {}
    for name, reason in view.held.items():
        state = reason.partition(":")[0]
        kinds[name] = (state if state in ("waiting", "paused") else "idle", reason)
    kinds |= {name: ("paused", reason) for name, reason in view.paused.items()}
    for name, start, tokens, reason in view.context:
        kinds[name] = ("context", f"{tokens} tokens from {start}; {reason}")
    return kinds | dict.fromkeys(view.generation, ("generation", "one token a step"))


def _bar(name: str, row: int, bar: dict[str, Any]) -> str:
    x, y = _LABEL + bar["start"] * _STEP, _HEADER + row * _ROW
    steps = f"step {bar['first']}" if bar["first"] == bar["last"] else f"steps {bar['first']}-{bar['last']}"
    return (
        f'<rect x="{x}" y="{y}" width="{(bar["end"] - bar["start"]) * _STEP - _GAP}" height="{_ROW - 4}" '
        f'fill="{_KINDS[bar["kind"]][0]}">'
        f"<title>{escape(name)}, {steps}: {escape(bar['detail'])}</title></rect>"
    )


def _decisions(views: list[StepView]) -> str:
    rows = []
    for view in views:
        entries = [*view.paused.items(), *view.admitted.items()]
        entries += [
            (name, f"{tokens} tokens from {start}; {reason}") for name, start, tokens, reason in view.context
        ]
        entries += [(name, reason) for name, _, reason in view.evicted]
        entries += [(name, f"finished: {reason}") for name, reason in view.finished.items()]
        rows += [
            f"<tr><td>{view.step}</td><td>{escape(name)}</td><td>{escape(reason)}</td></tr>"
            for name, reason in entries
        ]
    return f"<table><tr><th>step</th><th>request</th><th>decision</th></tr>{''.join(rows)}</table>"
