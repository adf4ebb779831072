"""Records of `tapeout bench` as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column to the left, the others, figures, to the right."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def place(record: Mapping[str, Any]) -> str:
    """The line that says what was measured where."""
    where = record["conditions"]
    machine, engine = where["machine"], where["engine"]
    device = machine["gpu"]["name"] if "gpu" in machine else machine["cpu"]
    weights = ", random weights" if "random_seed" in engine["weights"] else ""
    untimed = "" if engine["timed_tactics"] else ", tactics not timed"
    return f"{engine['file']} ({engine['model']['dtype']}{weights}{untimed}) on {device}"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def latency_text(record: Mapping[str, Any]) -> str:
    header = (
        "point",
        "batch",
        "in",
        "out",
        "latency ms",
        "TTFT ms",
        "ms/step",
        "roofline ms",
        "of it",
        "tok/s",
    )
    rows = []
    for p in record["points"]:
        roof = p["roofline"]
        rows.append(
            (
                p["name"],
                str(p["batch_size"]),
                str(p["input_len"]),
                str(p["output_len"]),
                number(p["percentiles"]["50"] * 1e3),
                number(p["median_ttft_ms"]),
                number(p["ms_per_decode_step"], 3),
                number(roof and roof["floor_ms"], 3),
                "-" if roof is None else f"{roof['share']:.0%}",
                number(p["output_tokens_per_second"], 1),
            )
        )
    lines = [place(record), "", columns(header, rows)]
    if record["read_bandwidth"] is not None:
        speed = record["read_bandwidth"]
        lines += ["", f"memory: {speed['bytes_per_second'] / 1e9:,.1f} GB/s ({speed['method']})"]
    return "\n".join(lines)


def throughput_text(record: Mapping[str, Any]) -> str:
    r = record
    totals = [
        ("requests", f"{r['num_requests']}"),
        ("tokens", f"{r['total_input_tokens']:,} in, {r['total_output_tokens']:,} out"),
        ("seconds", f"{r['elapsed_time']:,.2f}"),
        ("requests/s", number(r["requests_per_second"])),
        ("output tokens/s", number(r["output_throughput"], 1)),
        ("all tokens/s", number(r["total_token_throughput"], 1)),
    ]
    width = max(len(name) for name, _ in totals)
    rows = [
        (name.upper(), *(number(r[f"{kind}_{name}_ms"]) for kind in ("mean", "median", "p99")))
        for name in ("ttft", "tpot", "itl", "e2el")
    ]
    return "\n".join(
        [
            place(record),
            "",
            *(f"{name:<{width}}  {value}" for name, value in totals),
            "",
            columns(("ms", "mean", "median", "p99"), rows),
        ]
    )


def startup_text(record: Mapping[str, Any]) -> str:
    first, runs = record["start_to_first_token_s"], len(record["starts"])
    rows = [(name, number(seconds, 3)) for name, seconds in record["phases_s"].items()]
    return "\n".join(
        [
            place(record),
            "",
            columns(("phase", "seconds"), [*rows, ("exec to first token", number(first, 3))]),
            "",
            f"medians of {runs} new processes; {record['what'].partition(';')[0].removeprefix('seconds ')}",
        ]
    )


def sweep_text(record: Mapping[str, Any]) -> str:
    header = ("batch", "tokens/step", "tok/s", "TPOT ms", "p99 ITL ms", "TTFT ms", "tok/s / TPOT", "")
    rows = []
    for p in record["points"]:
        limits = {name: p[name] for name in ("max_batch_size", "max_num_tokens")}
        rows.append(
            (
                str(p["max_batch_size"]),
                str(p["max_num_tokens"]),
                number(p["output_throughput"], 1),
                number(p["median_tpot_ms"]),
                number(p["p99_itl_ms"]),
                number(p["median_ttft_ms"]),
                number(p["power"] / 1e3, 1),
                "<- knee" if limits == record["knee"] else "",
            )
        )
    return "\n".join([place(record), "", columns(header, rows), "", f"knee: {record['knee_definition']}"])
