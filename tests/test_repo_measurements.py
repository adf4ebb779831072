"""Figures in documents are those of the records under benchmarks/results/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_the_cuda_page_shows_its_records(repo: Path) -> None:
    results = repo / "benchmarks/results"
    rows = re.findall(r"^\| (decode|prefill), (?:batch )?(\d+)(?: tokens)? \| ([\d.]+) \| ([\d.]+) \|$",
                      (repo / "docs/cuda.md").read_text(), re.M)  # fmt: skip
    first = json.loads((results / "decode_cuda_llama1b.json").read_text())
    before = {("decode", str(d["batch"])): d["ms"] for d in first["decode"]}
    before |= {("prefill", str(p["prompt_tokens"])): p["ms"] for p in first["prefill"]}
    now = json.loads((results / "design_table.json").read_text())["models"]["1b"]["figures"]
    assert len(rows) == 6
    for kind, size, was, is_now in rows:
        assert was == f"{before[kind, size]:.2f}", (kind, size)
        assert is_now == f"{now[f'{kind}-{size}']:.2f}", (kind, size)


def test_the_design_table_is_that_of_its_record(benchmark_program: Callable[[str], ModuleType]) -> None:
    rows = benchmark_program("design_rows")
    for document in rows.DOCUMENTS:
        text = document.read_text()
        assert rows.place(text, rows.render()) == text, f"{document.name}: run `make docs`"


def test_the_design_table_shows_both_sides_figures(repo: Path) -> None:
    """Read from the table itself, not by the code that wrote it."""
    pattern = r"^\| (8B|1B) \| ([^|]+) \| [≤≥] ([\d.,]+) [^|]+ \| ([\d.,]+) [^|]+ \| ([^|]+) \| ([\d.]*) ?\|$"
    shown = re.findall(pattern, (repo / "README.md").read_text(), re.M)
    peer = json.loads((repo / "benchmarks/peers/vllm_0.26_h200.json").read_text())
    record = repo / "benchmarks/results/design_table.json"
    models = json.loads(record.read_text())["models"] if record.exists() else {}
    assert len(shown) == 11
    for model, what, _, theirs, ours, ratio in shown:
        kind, number = what.split(",")[0], re.sub(r"\D", "", what)
        vllm = peer[f"vllm{model.lower()}"]
        expected = {
            "exec to first token": peer["vllm8b_warm"]["cold"]["start_to_first_token_s"],
            "decode": {str(d["batch"]): d["ms_per_token_decode"] for d in vllm["decode"]}.get(number),
            "prefill": {str(p["prompt_len"]): p["ms"] for p in vllm["prefill"]}.get(number),
            "mixed": vllm["mixed"]["output_tok_s"],
        }[kind]
        digits = len(theirs.partition(".")[2])
        assert theirs == f"{expected:,.{digits}f}", what
        key = {"exec to first token": "startup", "mixed": "mixed"}.get(kind, f"{kind}-{number}")
        value = models.get(model.lower(), {}).get("figures", {}).get(key)
        if value is None:
            assert (ours, ratio) == ("not measured", ""), what
        else:
            assert ours.split()[0] == f"{value:,.{digits}f}", what
            faster = value / expected if kind == "mixed" else expected / value
            figures = (theirs, ours.split()[0])
            carried = min(len(re.sub(r"[.,]", "", text).lstrip("0")) for text in figures)
            decimals = len(ratio.partition(".")[2])
            assert ratio == f"{faster:.{decimals}f}", what
            assert len(ratio.replace(".", "")) == min(carried, 3), "as many as the figures carry"


def test_the_readme_shows_its_records(repo: Path) -> None:
    row = r"^\| (float32|bfloat16|int8-dynamic)[^|]* \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(row, (repo / "README.md").read_text(), re.M)
    shown = {(kind, int(batch)): tuple(map(float, figures)) for kind, batch, *figures in rows}
    measured = {}
    for kind in ("float32", "bfloat16", "int8-dynamic"):
        path = repo / f"benchmarks/results/decode_cpu_{kind.replace('-', '_')}.json"
        for r in json.loads(path.read_text())["results"]:
            rates = (round(r["hf_tokens_per_s"], 1), round(r["engine_tokens_per_s"], 1))
            measured[kind, r["batch"]] = (*rates, round(r["ratio"], 2))
    assert shown == measured


def test_the_page_of_models_shows_its_record(repo: Path) -> None:
    record = json.loads((repo / "benchmarks/results/trace_cost.json").read_text())
    text = " ".join((repo / "docs/models.md").read_text().split())
    seconds = record["user_cpu_seconds"]
    shown = f"takes {seconds['trace']} s of CPU time, then {seconds['passes']} s of passes, and "
    assert f"{shown}{record['peak_memory_mb']} MB" in text


def test_the_segments_table_is_that_of_its_record(
    repo: Path, benchmark_program: Callable[[str], ModuleType]
) -> None:
    """And the record holds what it has to: every model in both dtypes for every compute capability."""
    rows = benchmark_program("tensorrt_rows")
    text = (repo / "docs/tensorrt.md").read_text()
    assert rows.place(text, rows.render()) == text
    builds = json.loads((repo / "benchmarks/results/tensorrt_rtx_segments.json").read_text())["builds"]
    found = {(b["model"], b["dtype"], b["sm"]) for b in builds}
    models = ("SmolLM2-135M", "tiny qwen3", "tiny gemma3_text")
    dtypes, sms = ("bfloat16", "float16"), (80, 86, 89, 120)
    assert found == {(model, dtype, sm) for model in models for dtype in dtypes for sm in sms}
    assert all(len(b["segments"]) == 3 and s["same_layers_twice"] for b in builds for s in b["segments"])


def test_a_marked_table_replaces_the_one_that_stood_there(
    benchmark_program: Callable[[str], ModuleType],
) -> None:
    marked = benchmark_program("marked_table").MarkedTable("<!-- here -->", "<!-- end -->")
    text = "a\n<!-- here -->\n{}\n<!-- end -->\nb"
    assert marked.place(text.format("old\nrows"), "new") == text.format("new")
    with pytest.raises(ValueError, match="<!-- here -->"):
        marked.place("no marks", "new")
