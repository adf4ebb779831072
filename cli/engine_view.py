"""An engine as plain data and as text, for `tapeout inspect`."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from tapeout.cli.format import human_bytes, table
from tapeout.compiler.report import report_path

if TYPE_CHECKING:
    from tapeout.runtime.engine import Engine, Record


def describe(engine: Engine, *, verified: bool, with_records: bool = False) -> dict[str, Any]:
    """Everything `inspect` shows, as JSON data.

    `tactics` holds one entry per op signature: how many records use it, the tactic of each row
    range, and `timings`, the report's figures (empty without a report beside the engine).
    """
    program = engine.program
    uses = Counter(record.signature for record in program.records)
    timings = _timings(engine)
    data: dict[str, Any] = {
        "engine": str(engine.path),
        "digest": engine.digest,
        "verified": verified,
        "files": {path.name: path.stat().st_size for path in engine.files},
        "sizes": engine.sizes(),
        "manifest": engine.manifest.to_json(),
        "program": {
            "records": len(program.records),
            "ops": dict(Counter(record.op for record in program.records).most_common()),
            "buffers": len(program.buffers),
            "arena_bytes": program.arena_bytes,
            "kv_page_bytes": engine.manifest.kv_cache.page_bytes(engine.manifest.limits.tokens_per_page),
        },
        "tactics": [
            {
                "signature": signature,
                "records": uses[signature],
                "ranges": [{"max_rows": r.max_rows, "tactic": r.tactic} for r in ranges],
                "timings": timings.get(signature, []),
            }
            for signature, ranges in program.tactics.items()
        ],
        "kernels": list(engine.kernel_names),
        "texts": list(engine.text_names),
    }
    if with_records:
        data["program"]["listing"] = [_record_line(i, record) for i, record in enumerate(program.records)]
    return data


def _timings(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    """Timings by signature from the report beside the engine; a report that cannot be read is none."""
    try:
        report = json.loads(report_path(engine.path).read_text(encoding="utf-8"))
        found: dict[str, list[dict[str, Any]]] = {}
        for timing in report["tactics"]:
            found.setdefault(timing.pop("signature"), []).append(timing)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return found


def _record_line(index: int, record: Record) -> str:
    def views(views: Any) -> str:
        return ", ".join(f"{v.buffer}:{v.dtype}[{','.join(map(str, v.shape))}]" for v in views)

    weights = f" weights {', '.join(w for w in record.weights if w)}" if any(record.weights) else ""
    attrs = "".join(f" {key}={value}" for key, value in record.attrs.items())
    return f"{index:4} {record.op}({views(record.inputs)}) -> {views(record.outputs)}{weights}{attrs}"


def render(data: dict[str, Any]) -> str:
    """The description as text."""
    manifest, program = data["manifest"], data["program"]
    parts = [
        _section("engine", _engine_rows(data)),
        _section(
            "limits", [(key.replace("_", "-"), str(value)) for key, value in manifest["limits"].items()]
        ),
        _section(
            "options", [(key.replace("_", "-"), str(value)) for key, value in manifest["options"].items()]
        ),
        _section("sizes", [(name, human_bytes(size)) for name, size in data["sizes"].items()]),
        _section("passes", [(name, f"{count} matches") for name, count in manifest["passes"].items()]),
        _section("parity", [(key, _plain(value)) for key, value in manifest["parity"].items()]),
        _section(
            "program",
            [
                ("records", f"{program['records']}  ({_counts(program['ops'])})"),
                ("buffers", f"{program['buffers']} in an arena of {human_bytes(program['arena_bytes'])}"),
                ("KV page", human_bytes(program["kv_page_bytes"])),
            ],
        ),
    ]
    if "listing" in program:
        parts.append("records\n" + "\n".join(program["listing"]))
    parts.append(_tactics(data["tactics"], timed=manifest["timed"]))
    if "onnx" in data:
        parts.append(f"wrote {data['onnx']}")
    return "\n".join(part for part in parts if part)


def _engine_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    manifest = data["manifest"]
    model = manifest["model"]
    rows = [("file", f"{name}  {human_bytes(size)}") for name, size in data["files"].items()]
    rows += [
        ("digest", data["digest"] + ("  (all checksums verified)" if data["verified"] else "")),
        ("target", manifest["target"]),
        ("model", f"{model['architecture']}, {model['dtype']}, quantize {model['quantize']}"),
        ("checkpoint", model["checkpoint"]),
        ("vocabulary", str(model["vocab_size"])),
    ]
    rows += [(f"version of {name}", version) for name, version in manifest["versions"].items()]
    return [*rows]


def _tactics(tactics: list[dict[str, Any]], *, timed: bool) -> str:
    lines = ["tactics" if timed else "tactics (untimed)"]
    for entry in tactics:
        ranges = ", ".join(f"up to {r['max_rows']} rows {r['tactic']}" for r in entry["ranges"])
        lines += [f"  {entry['signature']}  × {entry['records']}", f"    {ranges}"]
        for timing in entry["timings"]:
            lines.append(f"      {timing['rows']:5} rows: {_timing(timing)}")
    return "\n".join(lines)


def _timing(timing: dict[str, Any]) -> str:
    median = timing.get("median_us")
    parts = [timing["tactic"] if median is None else f"{timing['tactic']} {median:.1f} µs"]
    parts += [f"{name} {us:.1f} µs" for name, us in timing.get("losers", {}).items()]
    parts += [f"{name} refused: {reason}" for name, reason in timing.get("rejected", {}).items()]
    return "; ".join(parts)


def _section(title: str, rows: list[tuple[str, ...]]) -> str:
    return f"{title}\n{table(rows)}" if rows else ""


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
