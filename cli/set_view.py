"""An engine set as plain data for `tapeout inspect`, and that data as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tapeout.cli.format import human_bytes, table
from tapeout.plugins.errors import TapeoutError

if TYPE_CHECKING:
    from tapeout.runtime.engine_set.directory import EngineSet


def describe_set(engines: EngineSet, *, verify: bool) -> dict[str, Any]:
    """Everything `inspect` shows of a set, as JSON data.

    `machine` is this one; `chosen` the file that it runs, or None with the reason in `why_not`. Of a set
    without an index, `model` and `versions` are empty, and so is the SHA-256 of an engine.
    """
    from tapeout.runtime.engine_set.choose import has_gpu_engines
    from tapeout.runtime.engine_set.machine import this_machine
    from tapeout.runtime.engine_set.verify import verify_set

    if verify:
        verify_set(engines)
    machine = this_machine(look_for_gpu=has_gpu_engines(engines.engines))
    chosen, why_not = None, None
    try:
        chosen = engines.choose(machine=machine).file
    except TapeoutError as error:
        why_not = error.message.splitlines()[0].rstrip(":")
    index = engines.index
    names = {name for entry in engines.engines for name in entry.weights}
    weights: list[dict[str, Any]] = (
        [asdict(entry) for entry in index.weights]
        if index is not None
        else [{"file": name, "size_bytes": _size(engines, name), "sha256": ""} for name in sorted(names)]
    )
    return {
        "set": str(engines.directory),
        "indexed": index is not None,
        "verified": verify,
        "model": "" if index is None else index.model,
        "source": engines.source,
        "versions": {} if index is None else dict(index.versions),
        "machine": machine.text(),
        "chosen": chosen,
        "why_not": why_not,
        "engines": [asdict(entry) | {"versions": dict(entry.versions)} for entry in engines.engines],
        "weights": [entry | {"present": (engines.directory / entry["file"]).is_file()} for entry in weights],
    }


def render_set(data: dict[str, Any]) -> str:
    """The description as text."""
    origin, *digests = data["source"].split()
    facts: list[tuple[str, ...]] = [
        ("set", data["set"] if data["indexed"] else f"{data['set']}  no index.json: read from its engines"),
        *([("model", data["model"])] if data["model"] else []),
        ("checkpoint", origin),
        *(("", digest) for digest in digests),
        ("checksums", "all files verified" if data["verified"] else "not read; --verify reads all files"),
        ("machine", data["machine"]),
        ("runs here", data["chosen"] or f"none: {data['why_not']}"),
    ]
    return "\n".join(
        [table(facts, indent=""), "", "engines", _engine_table(data), *_weight_lines(data["weights"])]
    )


def _engine_table(data: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [
        ("file", "target", "dtype", "quantize", "batch", "tokens", "sequence", "size", "")
    ]
    for entry in data["engines"]:
        limits = entry["limits"]
        notes = ["timed" if entry["timed"] else "untimed"]
        notes += ["runs here"] * (entry["file"] == data["chosen"])
        rows.append(
            (
                entry["file"],
                entry["target"] if entry["sku"] is None else f"{entry['target']} (sm_{entry['sm']})",
                entry["dtype"],
                entry["quantize"],
                str(limits["max_batch_size"]),
                str(limits["max_num_tokens"]),
                str(limits["max_seq_len"]),
                human_bytes(entry["size_bytes"]),
                ", ".join(notes),
            )
        )
    return table(rows)


def _weight_lines(weights: list[dict[str, Any]]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        (
            w["file"],
            human_bytes(w["size_bytes"]) if w["size_bytes"] else "",
            "" if w["present"] else "not here",
        )
        for w in weights
    ]
    return ["shared weights", table(rows)] if rows else []


def _size(engines: EngineSet, name: str) -> int:
    path = engines.directory / name
    return path.stat().st_size if path.is_file() else 0
