"""Figures in documents are those of the records under benchmarks/results/."""

from __future__ import annotations

import json
import re
from pathlib import Path


def test_the_cuda_page_shows_its_record(repo: Path) -> None:
    record = json.loads((repo / "benchmarks/results/decode_cuda_llama1b.json").read_text())
    rows = re.findall(r"^\| (decode|prefill), (?:batch )?(\d+)(?: tokens)? \| ([\d.]+) \|$",
                      (repo / "docs/cuda.md").read_text(), re.M)  # fmt: skip
    shown = {(kind, int(size)): float(ms) for kind, size, ms in rows}
    measured = {("decode", d["batch"]): round(d["ms"], 2) for d in record["decode"]}
    measured |= {("prefill", p["prompt_tokens"]): round(p["ms"], 2) for p in record["prefill"]}
    assert shown == measured


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
