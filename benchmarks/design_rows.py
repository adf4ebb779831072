"""The budgets of GPU engines, the peer's figures beside them, and ours from their record.

    python benchmarks/design_rows.py      writes the table into README.md and docs/cuda.md

A row names where its figures stand: ours in `results/design_table.json` (`run_design_table.py` writes it),
the peer's in `peers/vllm_0.26_h200.json`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marked_table import MarkedTable

HERE = Path(__file__).parent
RECORD = HERE / "results" / "design_table.json"
PEER = HERE / "peers" / "vllm_0.26_h200.json"
DOCUMENTS = (HERE.parent / "README.md", HERE.parent / "docs" / "cuda.md")
place = MarkedTable(
    "<!-- design table: python benchmarks/design_rows.py -->", "<!-- end of design table -->"
).place


@dataclass(frozen=True)
class Row:
    """One budget: at most so many `unit`, or at least where more is better.

    `model` is 8b or 1b, `key` what `run_design_table.py` calls the figure; `peer` leads to the peer's.
    """

    what: str
    model: str
    key: str
    budget: float
    unit: str
    digits: int
    peer: tuple[str | int, ...]
    more_is_better: bool = False


def _decode(model: str, index: int, batch: int, budget: float) -> Row:
    peer = (f"vllm{model}", "decode", index, "ms_per_token_decode")
    return Row(f"decode, batch {batch}", model, f"decode-{batch}", budget, "ms", 2, peer)


ROWS = (
    Row(
        "exec to first token", "8b", "startup", 2.0, "s", 1, ("vllm8b_warm", "cold", "start_to_first_token_s")
    ),
    _decode("8b", 0, 1, 3.85),
    _decode("8b", 1, 8, 4.4),
    _decode("8b", 2, 32, 4.9),
    _decode("8b", 3, 64, 5.4),
    _decode("8b", 4, 128, 6.6),
    Row("prefill, 2048 tokens", "8b", "prefill-2048", 45.0, "ms", 1, ("vllm8b", "prefill", 0, "ms")),
    Row("prefill, 8192 tokens", "8b", "prefill-8192", 190.0, "ms", 1, ("vllm8b", "prefill", 1, "ms")),
    Row("mixed, 512 requests", "8b", "mixed", 9700.0, "tok/s", 0, ("vllm8b", "mixed", "output_tok_s"), True),
    _decode("1b", 0, 1, 0.70),
    Row("mixed, 512 requests", "1b", "mixed", 30000.0, "tok/s", 0, ("vllm1b", "mixed", "output_tok_s"), True),
)


def read_record() -> dict[str, Any]:
    """The record; one without figures when none was made yet."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"models": {}}


def ours(record: dict[str, Any], row: Row) -> float | None:
    """Our figure, None when it was not measured."""
    value: float | None = record["models"].get(row.model, {}).get("figures", {}).get(row.key)
    return value


def peers(data: dict[str, Any], row: Row) -> float:
    value: Any = data
    for step in row.peer:
        value = value[step]
    return float(value)


def render() -> str:
    """The table as Markdown, with a line for each model's conditions."""
    record, peer = read_record(), json.loads(PEER.read_text())
    lines = ["| model | what | budget | vLLM 0.26 | tapeout | times faster |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        value, theirs = ours(record, row), peers(peer, row)
        sign = "≥" if row.more_is_better else "≤"
        shown = ["not measured", ""]
        if value is not None:
            ratio = value / theirs if row.more_is_better else theirs / value
            figure = _figure(value, row)
            shown = [f"{figure} {row.unit}", _ratio(ratio, figure, _figure(theirs, row))]
        budget = f"{sign} {_figure(row.budget, row)} {row.unit}"
        cells = [row.model.upper(), row.what, budget, f"{_figure(theirs, row)} {row.unit}", *shown]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join([*lines, "", *_conditions(record)])


def _figure(value: float, row: Row) -> str:
    return f"{value:,.{row.digits}f}"


def _ratio(ratio: float, *figures: str) -> str:
    """To two decimals, and to no more digits than the figures that it comes from are shown with."""
    carried = min(len(re.sub(r"\D", "", figure).lstrip("0")) for figure in figures)
    before_point = math.floor(math.log10(ratio)) + 1
    return f"{ratio:.{max(0, min(2, carried - before_point))}f}"


def _conditions(record: dict[str, Any]) -> list[str]:
    if not record["models"]:
        return ["No record yet: `python benchmarks/run_design_table.py` makes it on a machine with the GPU."]
    lines = []
    for name, model in sorted(record["models"].items(), reverse=True):
        machine, engine = model["conditions"]["machine"], model["conditions"]["engine"]
        tactics = "timed" if engine["timed_tactics"] else "not timed"
        weights = "random" if "random_seed" in engine["weights"] else "the model's"
        lines.append(
            f"{name.upper()}: {machine['gpu']['name'] if 'gpu' in machine else machine['cpu']}, "
            f"{model['conditions']['date'][:10]}, commit {model['conditions']['commit']}, tactics {tactics}, "
            f"weights {weights}, {engine['model']['dtype']}."
        )
    return lines


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(place(document.read_text(), render()))
        print(f"wrote {document}")
