"""An engine as plain data, for `tapeout inspect`; `engine_text.py` renders it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tapeout.compiler.report import StepTiming, report_path
from tapeout.runtime.engine.codec import encode

if TYPE_CHECKING:
    from tapeout.runtime.engine import Engine, Record, View
    from tapeout.runtime.engine.launches import LaunchTable, RangeLaunches
    from tapeout.runtime.engine.program import TacticRange


def describe(engine: Engine, *, verified: bool, with_records: bool = False) -> dict[str, Any]:
    """Everything `inspect` shows, as JSON data.

    `tactics` holds one entry per op signature: how many records use it, the tactic of each row
    range, the same for steps that only decode where an engine for a GPU has other tactics there, and
    `timings`, the report's figures (empty without a report beside the engine). `steps` are the report's
    whole steps, which decided on tactics where they were timed. `report` is the report's
    file name and its figures of the comparison with HF, None without one. `libraries` are those that it
    needs beside its kernels, by name, with the versions its tactics were timed with. `segments` are
    engines of TensorRT's, each with the regions that it runs, its tensors, profiles and layers.
    """
    program, manifest = engine.program, engine.manifest
    limits, launches = manifest.limits, engine.launches
    uses = Counter(record.signature for record in program.records)
    report = _report(engine)
    timings = report["timings"] if report else {}
    page_bytes = manifest.kv_cache.page_bytes(limits.tokens_per_page)
    data: dict[str, Any] = {
        "engine": str(engine.path),
        "digest": engine.digest,
        "verified": verified,
        "files": {path.name: path.stat().st_size for path in engine.files},
        "sizes": engine.sizes(),
        "manifest": manifest.to_json(),
        "program": {
            "records": len(program.records),
            "ops": dict(Counter(record.op for record in program.records).most_common()),
            "buffers": len(program.buffers),
            "arena_bytes": program.arena_bytes,
            "workspace_bytes": launches.workspace_bytes + launches.scratch_bytes if launches else 0,
            "kv_page_bytes": page_bytes,
            "kv_cache_bytes": limits.pool_pages * page_bytes,
        },
        "tactics": [
            {
                "signature": signature,
                "records": uses[signature],
                "ranges": _ranges(ranges),
                "decode_ranges": _ranges(launches.decode_ranges.get(signature, ()) if launches else ()),
                "timings": timings.get(signature, []),
            }
            for signature, ranges in program.tactics.items()
        ],
        "steps": report["steps"] if report else [],
        "report": report and {"file": report_path(engine.path).name, "parity": report["parity"]},
        "segments": _segments(engine, launches),
        "kernels": list(engine.kernel_names),
        "libraries": _libraries(launches),
        "texts": list(engine.text_names),
    }
    if with_records:
        offsets = {buffer.name: buffer.offset_bytes for buffer in program.buffers}
        data["program"]["listing"] = [record_line(i, r, offsets) for i, r in enumerate(program.records)]
    return data


def _libraries(launches: LaunchTable | None) -> dict[str, list[str]]:
    versions = launches.matmul_versions() if launches else ()
    shown = [f"{v // 10000}.{v // 100 % 100}.{v % 100}" for v in versions]
    libraries = {"cublasLt": shown} if shown else {}
    for package, version in sorted({(s.package, s.version) for s in launches.segments} if launches else ()):
        libraries.setdefault(package, []).append(version)
    return libraries


def _segments(engine: Engine, launches: LaunchTable | None) -> list[dict[str, Any]]:
    """Every segment, as the launch table has it, with its size and the regions it runs."""
    if launches is None:
        return []
    records = engine.program.records
    found = []
    for number, segment in enumerate(launches.segments):
        regions = [region for region in launches.regions if region.segment == number]
        first = regions[0]
        found.append(
            {
                **encode(segment),
                "size_bytes": len(engine.segment(segment.blob)),
                "ops": [record.op for record in records[first.first : first.last]],
                "regions": [
                    {"first": r.first, "last": r.last, "symbol": r.symbol, "ranges": encode(r.ranges)}
                    for r in regions
                ],
            }
        )
    return found


def _ranges(ranges: Sequence[TacticRange | RangeLaunches]) -> list[dict[str, Any]]:
    return [{"max_rows": r.max_rows, "tactic": r.tactic} for r in ranges]


def _report(engine: Engine) -> dict[str, Any] | None:
    """Timings by signature and parity figures of the report beside the engine.

    A report that cannot be read, or that is about another build, is none.
    """
    try:
        report = json.loads(report_path(engine.path).read_text(encoding="utf-8"))
        if report["section_bytes"] != engine.sizes():
            return None
        known = engine.manifest.parity
        figures = {key: value for key, value in report["parity"].items() if key not in known}
        timings: dict[str, list[dict[str, Any]]] = {}
        for timing in report["tactics"]:
            timings.setdefault(timing.pop("signature"), []).append(timing)
        steps = [asdict(StepTiming(**step)) for step in report.get("steps", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return {"timings": timings, "parity": figures, "steps": steps}


def record_line(index: int, record: Record, offsets: dict[str, int]) -> str:
    """One launch record; `@` gives an output's offset in the arena in bytes."""
    inputs = ", ".join(_view(v) for v in record.inputs)
    outputs = ", ".join(f"{_view(v)} @{offsets[v.buffer]}" for v in record.outputs)
    weights = f" weights {', '.join(w for w in record.weights if w)}" if any(record.weights) else ""
    attrs = "".join(f" {key}={value}" for key, value in record.attrs.items())
    return f"{index:4} {record.op}({inputs}) -> {outputs}{weights}{attrs}"


def _view(view: View) -> str:
    """As the IR writes it: shape, then strides and offset where the view is a window."""
    parts = [view.shape, *([] if _contiguous(view) else [view.strides])]
    parts += [(view.offset,)] if view.offset else []
    return f"{view.buffer}:{view.dtype}[{'|'.join(','.join(map(str, part)) for part in parts)}]"


def _contiguous(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if stride != expected:
            return False
        expected *= size if isinstance(size, int) else 1
    return view.offset == 0
