"""An engine set as plain data for `tapeout inspect`, and that data as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.cli.format import human_bytes, table
from tapeout.plugins.errors import TapeoutError

if TYPE_CHECKING:
    from tapeout.runtime.engine_set.directory import EngineSet
    from tapeout.runtime.engine_set.index import EngineEntry, EngineSetIndex


def describe_set(engines: EngineSet, *, verify: bool) -> dict[str, Any]:
    """Everything `inspect` shows of a set in a directory, as JSON data.

    `machine` is this one; `chosen` the file that it runs, or None with the reason in `why_not`. Of a set
    without an index, `model` and `versions` are empty, and so is the SHA-256 of an engine.
    """
    from tapeout.runtime.engine_set.index import WeightsEntry
    from tapeout.runtime.engine_set.verify import verify_set

    if verify:
        verify_set(engines)
    index = engines.index
    names = sorted({name for entry in engines.engines for name in entry.weights})
    return {
        **_choice(engines.engines, str(engines.directory)),
        "indexed": index is not None,
        "verified": verify,
        "model": "" if index is None else index.model,
        "source": engines.source,
        "versions": {} if index is None else dict(index.versions),
        "weights": [
            asdict(entry) | {"present": (engines.directory / entry.file).is_file()}
            for entry in (
                index.weights
                if index is not None
                else [WeightsEntry(name, _size(engines.directory / name), "") for name in names]
            )
        ],
    }


def describe_stored(index: EngineSetIndex, where: str) -> dict[str, Any]:
    """The same of a set in a store, of which nothing but the index has been read."""
    return {
        **_choice(index.engines, where),
        "indexed": True,
        "verified": False,
        "model": index.model,
        "source": index.source,
        "versions": dict(index.versions),
        "weights": [asdict(entry) | {"present": True} for entry in index.weights],
    }


def _choice(entries: Sequence[EngineEntry], where: str) -> dict[str, Any]:
    """The engines of a set, this machine, and which of them it runs."""
    from tapeout.runtime.engine_set.choose import choose_engine, has_gpu_engines
    from tapeout.runtime.engine_set.machine import this_machine

    machine = this_machine(look_for_gpu=has_gpu_engines(entries))
    chosen, why_not = None, None
    try:
        chosen = choose_engine(entries, machine, where).file
    except TapeoutError as error:
        why_not = error.message.splitlines()[0].rstrip(":")
    return {
        "set": where,
        "machine": machine.text(),
        "chosen": chosen,
        "why_not": why_not,
        "engines": [asdict(entry) | {"versions": dict(entry.versions)} for entry in entries],
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


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
