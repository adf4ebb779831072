"""Times of rivals by row counts, as tables for 100 columns; and why others were not taken."""

from __future__ import annotations

import textwrap
from typing import Any

from tapeout.cli.format import WIDTH, counted

#: Row counts in one line of a table, and rivals in it; GPUs have dozens of either.
_ANCHORS_PER_LINE, _TACTICS_SHOWN = 10, 12


def times_lines(timings: list[dict[str, Any]]) -> list[str]:
    """One row for each tactic, one column for each row count that was timed."""
    timed = [t for t in timings if t.get("time_us") is not None]
    # Those that were chosen somewhere, then the others, the fastest first.
    losers = [(time, name) for t in timed for name, time in t.get("losers", {}).items()]
    names = list(dict.fromkeys([t["tactic"] for t in timed] + [name for _, name in sorted(losers)]))
    left, names = names[_TACTICS_SHOWN:], names[:_TACTICS_SHOWN]
    width = max(map(len, ["rows", *names]))
    columns = min(_ANCHORS_PER_LINE, max(1, (WIDTH - 6 - width) // 8))
    lines: list[str] = []
    for start in range(0, len(timed), columns):
        block = timed[start : start + columns]
        lines.append(f"      {'rows':{width}}" + "".join(f" {t['rows']:>6} " for t in block))
        lines += [f"      {name:{width}}" + "".join(_cell(name, t) for t in block) for name in names]
    lines = [line.rstrip() for line in lines]
    if left:
        lines.append(f"      and {counted(len(left), 'slower tactic')}, see --json")
    return lines + _refusals(timings)


def _refusals(timings: list[dict[str, Any]]) -> list[str]:
    """Why tactics were not taken; those with one reason stand together."""
    rows_of: dict[tuple[str, str], list[str]] = {}
    for timing in timings:
        for name, reason in timing.get("rejected", {}).items():
            rows_of.setdefault((name, reason), []).append(str(timing["rows"]))
    names_of: dict[tuple[str, str], list[str]] = {}
    for (name, reason), rows in rows_of.items():
        at = f" at {', '.join(rows)} rows" if len(rows) < len(timings) else ""
        names_of.setdefault((at, reason), []).append(name)
    lines = []
    for (at, reason), names in names_of.items():
        text = f"{', '.join(names)} refused{at}: {reason}"
        lines += textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 8)
    return lines


def _cell(name: str, timing: dict[str, Any]) -> str:
    if name == timing["tactic"]:
        return f" {_microseconds(timing['time_us']):>6}*"
    time = timing.get("losers", {}).get(name)
    return f" {'-' if time is None else _microseconds(time):>6} "


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
