"""What `tapeout inspect` prints of an engine's TensorRT segments."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from typing import Any

import click

from tapeout.cli.format import WIDTH, counted, human_bytes
from tapeout.cli.times_text import times_lines

#: What TensorRT adds to a layer's name in each profile.
_NUMBERS = re.compile(r" \[profile \d+\]|(_U\d+)?_myl\d+_\d+$|(?<=__mye)\d+_\d+")


def segments_text(segments: list[dict[str, Any]]) -> str:
    """Every segment: what it runs, what crosses its border, its profiles and its layers."""
    packages = ", ".join(sorted({f"{s['package']} {s['version']}" for s in segments}))
    lines = [click.style("segments", bold=True) + f" (TensorRT engines by {packages})"]
    for segment in segments:
        regions = segment["regions"]
        places = ", ".join(f"{r['first']}..{r['last'] - 1}" for r in regions)
        count = counted(len(regions), "region")
        lines += ["", f"  {segment['blob']}  {human_bytes(segment['size_bytes'])}, {count}"]
        lines += _wrapped("ops", ", ".join(segment["ops"]))
        lines += _wrapped("records", places)
        for what in ("inputs", "weights", "outputs"):
            lines += _wrapped(what, ", ".join(_tensor(tensor) for tensor in segment[what]))
        for number, profile in enumerate(segment["profiles"]):
            rows = ", ".join(
                f"{symbol} {r['least']} to {r['most']}, tuned for {r['typical']}"
                for symbol, r in profile["rows"].items()
            )
            lines += _wrapped(f"profile {number}", rows)
        lines += _layers(segment["layers"])
    return "\n".join(lines)


def regions_lines(regions: list[dict[str, Any]]) -> list[str]:
    """Every distinct region that TensorRT competed for: what it and our kernels took, bucket by bucket.

    `regions`: fields of `tapeout.runtime.engine.manifest.RegionTime`.
    """
    lines = [click.style("regions", bold=True) + " (µs by rows, * runs there; ours: our kernels in a row)"]
    for digest in dict.fromkeys(region["digest"] for region in regions):
        mine = [region for region in regions if region["digest"] == digest]
        uses = f"  × {mine[0]['regions']}" if mine[0]["regions"] else ""
        lines += ["", f"  {digest}{uses}", *_wrapped("ops", ", ".join(mine[0]["ops"]))]
        for kind in dict.fromkeys(region["kind"] for region in mine):
            title = "steps that only decode" if kind == "decode" else "steps of any kind"
            table = times_lines([_rivals(region) for region in mine if region["kind"] == kind])
            lines += [f"    {title}", *table]
    return lines


def _rivals(region: dict[str, Any]) -> dict[str, Any]:
    """A region's bucket as `times_lines` takes it."""
    times = {"tensorrt": region["segment_us"], "ours": region["own_us"]}
    winner = "tensorrt" if region["winner"] == "tensorrt" else "ours"
    return {
        "rows": max(region["rows"], region["logit_rows"]),
        "tactic": winner,
        "time_us": times.pop(winner),
        "losers": {name: time for name, time in times.items() if time is not None},
        "rejected": {"tensorrt": region["reason"]} if region["reason"] else {},
    }


def _layers(layers: list[str]) -> list[str]:
    """Layers without the numbers that tell profiles and instances apart, and how often each occurs."""
    counts = Counter(_NUMBERS.sub("", layer) for layer in layers)
    lines = _wrapped("layers", f"{len(layers)} in all profiles")
    return lines + [f"      {count} × {layer}"[:WIDTH] for layer, count in counts.items()]


def _tensor(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']} {tensor['dtype']}[{','.join(map(str, tensor['shape']))}]"


def _wrapped(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"    {name:<11}", subsequent_indent=" " * 15)
