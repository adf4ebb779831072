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
