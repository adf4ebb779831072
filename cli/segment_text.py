"""What `tapeout inspect` prints of an engine's TensorRT segments."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from typing import Any

import click

from tapeout.cli.format import human_bytes

_WIDTH = 100
#: What TensorRT adds to a layer's name in each profile.
_NUMBERS = re.compile(r" \[profile \d+\]|(_U\d+)?_myl\d+_\d+$|(?<=__mye)\d+_\d+")


def segments_text(segments: list[dict[str, Any]]) -> str:
    """Every segment: what it runs, what crosses its border, its profiles and its layers."""
    packages = ", ".join(sorted({f"{s['package']} {s['version']}" for s in segments}))
    lines = [click.style("segments", bold=True) + f" (TensorRT engines by {packages})"]
    for segment in segments:
        regions = segment["regions"]
        places = ", ".join(f"{r['first']}..{r['last'] - 1}" for r in regions)
        count = f"{len(regions)} region{'' if len(regions) == 1 else 's'}"
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


def _layers(layers: list[str]) -> list[str]:
    """Layers without the numbers that tell profiles and instances apart, and how often each occurs."""
    counts = Counter(_NUMBERS.sub("", layer) for layer in layers)
    lines = _wrapped("layers", f"{len(layers)} in all profiles")
    return lines + [f"      {count} × {layer}"[:_WIDTH] for layer, count in counts.items()]


def _tensor(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']} {tensor['dtype']}[{','.join(map(str, tensor['shape']))}]"


def _wrapped(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"    {name:<11}", subsequent_indent=" " * 15)
