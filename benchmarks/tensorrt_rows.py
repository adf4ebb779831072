"""Writes the record of `tensorrt_rtx_segments.py` as the table in docs/tensorrt.md.

python benchmarks/tensorrt_rows.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from marked_table import MarkedTable

HERE = Path(__file__).parent
RECORD = HERE / "results" / "tensorrt_rtx_segments.json"
DOCUMENT = HERE.parent / "docs" / "tensorrt.md"
place = MarkedTable(
    "<!-- segments table: python benchmarks/tensorrt_rows.py -->", "<!-- end of segments table -->"
).place
_WHERE = ("first", "middle", "last")


def render() -> str:
    """A row for each model, dtype and region; figures of all compute capabilities as ranges."""
    record = json.loads(RECORD.read_text())
    titles = ("model", "dtype", "region", "ops", "weights outside", "ONNX", "segment", "seconds", "layers")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for build in record["builds"]:
        for where, segment in enumerate(build["segments"]):
            groups.setdefault((build["model"], build["dtype"], where), []).append(segment)
    for (model, dtype, region), segments in groups.items():
        one = segments[0]
        cells = [
            model, dtype, f"{_WHERE[region]} × {one['regions']}", str(len(one["ops"])),
            f"{one['weight_bytes'] / 1e6:.1f} MB", f"{one['onnx_bytes'] / 1e3:.1f} kB",
            _range([s["plan_bytes"] / 1e3 for s in segments], 0) + " kB",
            _range([s["seconds"] for s in segments], 2),
            _range([float(sum(s["layers"].values())) for s in segments], 0),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    twice = [s["same_bytes_twice"] for b in record["builds"] for s in b["segments"]]
    layers = [s["same_layers_twice"] for b in record["builds"] for s in b["segments"]]
    sms = ", ".join(f"sm_{sm}" for sm in sorted({build["sm"] for build in record["builds"]}))
    where = record["conditions"]
    lines += ["", f"{where['package']}, {sms}; ranges are over these."]
    lines.append(
        f"Built twice, {sum(layers)} of {len(layers)} had the same layers and {sum(twice)} the same bytes."
    )
    lines.append(
        f"{where['date']}, commit {where['commit']}, {where['cores']} cores of {where['cpu']}, "
        f"load average {where['load_average'][0]}."
    )
    return "\n".join(lines)


def _range(values: list[float], digits: int) -> str:
    low, high = (f"{v:,.{digits}f}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    DOCUMENT.write_text(place(DOCUMENT.read_text(), render()))
    print(f"wrote {DOCUMENT}")
