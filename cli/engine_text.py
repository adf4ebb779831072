"""What `tapeout inspect` prints: the data of `engine_view.py` as text for 100 columns."""

from __future__ import annotations

import textwrap
from typing import Any

import click

from tapeout.cli.format import WIDTH, counted, human_bytes, table
from tapeout.cli.segment_text import regions_lines, segments_text
from tapeout.cli.times_text import times_lines
from tapeout.compiler.report import StepTiming

#: Columns for values that may be long, right of the names of their section.
_VALUE_WIDTH = 84


def render(data: dict[str, Any]) -> str:
    """The description as text."""
    manifest, program = data["manifest"], data["program"]
    parts = [
        _section("engine", _engine_rows(data)),
        _section("model", _model_rows(manifest)),
        _section("limits", [(_dashed(key), str(value)) for key, value in manifest["limits"].items()]),
        _section("built with", _build_rows(manifest)),
        _section("sizes", _size_rows(data)),
        _section(
            "passes", [(name, counted(count, "match", "es")) for name, count in manifest["passes"].items()]
        ),
        _section("parity", _parity_rows(data)),
        _section("program", _program_rows(manifest, program)),
    ]
    if "listing" in program:
        parts.append(_title("records") + "\n" + "\n".join(program["listing"]))
    if data["segments"]:
        parts.append(segments_text(data["segments"]))
    if regions := data["manifest"].get("regions"):
        parts.append("\n".join(regions_lines(regions)))
    parts.append(_tactics(data))
    if "onnx" in data:
        parts.append(f"wrote {data['onnx']}")
    return "\n".join(part for part in parts if part)


def _engine_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [("file", f"{name}  {human_bytes(size)}") for name, size in data["files"].items()]
    rows += [
        ("digest", data["digest"]),
        ("checksums", "all verified" if data["verified"] else "header verified; --verify reads the rest"),
        ("target", data["manifest"]["target"]),
        *(("needs", f"{name} {', '.join(versions)}") for name, versions in data["libraries"].items()),
    ]
    return [*rows]


def _types(stored: dict[str, int]) -> list[str]:
    """The checkpoint's tensors by type: `(Q4_K x 100, F32 x 109)`."""
    return ["(" + ", ".join(f"{name} x {count}" for name, count in stored.items()) + ")"] if stored else []


def _model_rows(manifest: dict[str, Any]) -> list[tuple[str, ...]]:
    model, tokenizer, generation = manifest["model"], manifest["tokenizer"], manifest["generation"]
    # origin, then digests of 64 digits: one a line
    origin, *digests = model["checkpoint"].split()
    rows = [
        ("architecture", f"{model['architecture']}, {model['dtype']}, quantize {model['quantize']}"),
        ("checkpoint", " ".join([origin, *_types(model["stored_types"])])),
        *(("", digest) for digest in digests),
        *_refit_rows(manifest["weights"].get("refit")),
        ("vocabulary", f"{model['vocab_size']} logits"),
        ("positions", f"{model['max_position_embeddings']} at most"),
    ]
    if tokenizer is None:
        rows.append(("tokenizer", "none: token ids only"))
    else:
        ids = [("bos", tokenizer["bos_token_id"]), ("eos", tokenizer["eos_token_ids"])]
        ids.append(("pad", tokenizer["pad_token_id"]))
        known = ", ".join(f"{name} {_plain(value)}" for name, value in ids if value not in (None, []))
        rows.append(("tokenizer", f"{tokenizer['vocab_size']} ids; {known}"))
    defaults = [f"{k} {_plain(v)}" for k, v in generation.items() if not k.endswith("_token_id")]
    if defaults:
        rows += _wrapped("generation", ", ".join(defaults))
    return [*rows]


def _refit_rows(refit: dict[str, Any] | None) -> list[tuple[str, ...]]:
    """What an engine with other weights was built from: its plan and tactics are of that."""
    if refit is None:
        return []
    origin, *digests = refit["built_from"].split()
    return [("built from", origin), *(("", digest) for digest in digests), ("", f"engine:{refit['engine']}")]


def _build_rows(manifest: dict[str, Any]) -> list[tuple[str, ...]]:
    """Options that say something (None is "as the model and the target have it"), then versions."""
    options = [(_dashed(k), _plain(v)) for k, v in manifest["options"].items() if v is not None]
    return [*options, *((f"{name} version", version) for name, version in manifest["versions"].items())]


def _size_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    segments = [segment["blob"] for segment in data["segments"]]
    names = {"kernels": data["kernels"], "segments": segments, "text": data["texts"]}
    return [
        (name.replace("_", " "), human_bytes(size), ", ".join(names.get(name, [])))
        for name, size in data["sizes"].items()
        if size
    ]


def _parity_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [(key, _plain(value)) for key, value in data["manifest"]["parity"].items()]
    figures = data["report"]["parity"] if data["report"] else {}
    return [*rows, *((key.replace("_", " "), _plain(value)) for key, value in figures.items())]


def _program_rows(manifest: dict[str, Any], program: dict[str, Any]) -> list[tuple[str, ...]]:
    kv, limits = manifest["kv_cache"], manifest["limits"]
    ops = ", ".join(f"{name} {count}" for name, count in program["ops"].items())
    whole = f"{limits['max_batch_size']} requests of {limits['max_seq_len']} tokens"
    return [
        ("records", str(program["records"])),
        *_wrapped("ops", ops),
        ("arena", f"{human_bytes(program['arena_bytes'])} for {program['buffers']} buffers"),
        *([("workspace", human_bytes(workspace))] if (workspace := program["workspace_bytes"]) else []),
        ("KV cache", f"{kv['layers']} layers, {kv['kv_heads']} heads of {kv['head_dim']}, {kv['dtype']}"),
        ("KV page", f"{human_bytes(program['kv_page_bytes'])} for {limits['tokens_per_page']} tokens"),
        ("KV pool", f"{human_bytes(program['kv_cache_bytes'])} for {whole}; a smaller one works too"),
    ]


def _wrapped(name: str, text: str) -> list[tuple[str, str]]:
    """A row, with more rows below it for what does not fit."""
    lines = textwrap.wrap(text, _VALUE_WIDTH)
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]


def _tactics(data: dict[str, Any]) -> str:
    tactics, report = data["tactics"], data["report"]
    timed, shown = data["manifest"]["timed"], report and f"µs by rows, * chosen, from {report['file']}"
    if any(t.get("time_us") is not None for entry in tactics for t in entry["timings"]):
        note = f" ({shown})" if timed else f" (partly timed; {shown})"
    elif timed:
        note = " (no times: the report of this build does not lie beside the engine)"
    else:
        note = " (untimed)"
    lines = [_title("tactics") + note]
    lines += [f"  {StepTiming(**step).text()}" for step in data["steps"]]
    for entry in tactics:
        lines += ["", *_signature(entry["signature"], entry["records"])]
        decode = [t for t in entry["timings"] if t.get("kind") == "decode"]
        lines += _ranges(entry["ranges"])
        lines += times_lines([t for t in entry["timings"] if t not in decode])
        if entry["decode_ranges"]:
            lines += ["    steps that only decode", *_ranges(entry["decode_ranges"]), *times_lines(decode)]
    return "\n".join(lines)


def _ranges(ranges: list[dict[str, Any]]) -> list[str]:
    text = ", ".join(f"up to {counted(r['max_rows'], 'row')} {r['tactic']}" for r in ranges)
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _signature(key: str, records: int) -> list[str]:
    """The op with its types, then its attributes on a line of their own."""
    types, _, attrs = key.removesuffix("}").partition("{")
    types = types.replace(";)", ")").replace("->", " -> ").replace(";", "; ")
    lines = [f"  {types}  × {records}"]
    return [*lines, *([f"    {attrs.replace(',', ', ')}"] if attrs else [])]


def _section(title: str, rows: list[tuple[str, ...]]) -> str:
    return f"{_title(title)}\n{table(rows)}" if rows else ""


def _title(text: str) -> str:
    """Bold on a terminal; click takes the codes out elsewhere."""
    return click.style(text, bold=True)


def _dashed(key: str) -> str:
    return key.replace("_", "-")


def _plain(value: Any) -> str:
    """A value of the manifest as people write it."""
    if isinstance(value, dict):
        return ", ".join(f"{_plain(v)} {str(k).replace('_', ' ')}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
