"""`tapeout bench` on a real engine: records, tables, refusals."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tapeout.cli.main import cli
from tapeout.runtime.bench.prompts import prompt_ids

VOCAB = 28
SHORT = ("--input-len", "6", "--output-len", "4")


@pytest.fixture
def bench(alphabet: Path) -> Callable[..., Result]:
    def call(kind: str, *args: str | Path, engine: Path | None = None) -> Result:
        return CliRunner().invoke(cli, ["bench", kind, str(engine or alphabet), *map(str, args)])

    return call


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Points that the alphabet engine can run."""
    data = {
        "version": 1,
        "vocab": VOCAB,
        "id_lo": 1,
        "id_hi": 27,
        "id_check": {"seed": 5, "first8": prompt_ids(5, 8, 1, 27).tolist()},
        "decode": [
            {"batch": b, "prompt_len": 8, "output_len": 5, "seed_base": 100_000 * b} for b in (1, 4, 128)
        ],
        "prefill": [{"prompt_len": n, "output_len": 1, "seed_base": n} for n in (100, 8192)],
        "mixed": {"requests": [{"prompt_len": 3 + i, "output_len": 2 + i, "seed": i} for i in range(9)]},
    }
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(data))
    return path


def record_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_latency_of_one_batch_has_vllms_fields_at_the_top(bench: Callable[..., Result]) -> None:
    record = record_of(bench("latency", *SHORT, "--batch-size", 2, "--num-iters", 3, "--json"))
    assert len(record["latencies"]) == 3
    assert record["avg_latency"] == pytest.approx(sum(record["latencies"]) / 3)
    assert set(record["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    steps = sorted(
        (a - f) / 3 * 1e3 for a, f in zip(record["latencies"], record["first_token_latencies"], strict=True)
    )
    assert record["ms_per_decode_step"] == pytest.approx(steps[1])
    assert 0 < record["median_ttft_ms"] <= max(record["first_token_latencies"]) * 1e3
    roof = record["roofline"]
    # The only weight is an embedding table; positions are 8 bytes, read at lengths 7, 8 and 9 by 2 rows.
    assert (roof["weight_bytes"], roof["kv_bytes"]) == (0, 2 * 8 * 8)
    speed = record["read_bandwidth"]["bytes_per_second"]
    assert roof["floor_ms"] == pytest.approx(128 / speed * 1e3)
    assert roof["share"] == pytest.approx(roof["floor_ms"] / record["ms_per_decode_step"])


def test_a_record_says_its_conditions(bench: Callable[..., Result], alphabet: Path) -> None:
    record = record_of(bench("latency", *SHORT, "--no-roofline", "--threads", 1, "--json"))
    assert record["read_bandwidth"] is None
    where = record["conditions"]
    assert {"date", "commit", "machine", "versions", "engine", "settings"} == set(where)
    assert where["machine"]["cpu"]
    assert {"python", "numpy", "torch", "tapeout"} <= set(where["versions"])
    assert where["engine"]["file"] == alphabet.name
    assert len(where["engine"]["sha256"]) == 64
    assert where["engine"]["limits"]["max_seq_len"] == 256
    assert where["settings"]["threads"] == 1


def test_latency_prints_a_line_for_each_batch(bench: Callable[..., Result]) -> None:
    result = bench("latency", *SHORT, "--batch-size", "1,4", "--num-iters", 1)
    assert result.exit_code == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines() if line.startswith("batch-")] == [
        "batch-1",
        "batch-4",
    ]
    assert "memory: " in result.stdout
    assert "batch-4: " in result.stderr  # progress


def test_latency_runs_the_points_of_a_workload(bench: Callable[..., Result], workload: Path) -> None:
    points = "decode-4,prefill-100"
    record = record_of(
        bench("latency", "--workload", workload, "--points", points, "--no-roofline", "--json")
    )
    decode, prefill = record["points"]
    assert (decode["batch_size"], decode["input_len"], decode["output_len"]) == (4, 8, 5)
    assert len(decode["latencies"]) == 3
    assert (prefill["batch_size"], prefill["input_len"], prefill["output_len"]) == (1, 100, 1)
    assert len(prefill["latencies"]) == 7
    assert prefill["ms_per_decode_step"] is None
    assert record["conditions"]["settings"]["workload"]["file"] == "workload.json"


def test_throughput_counts_tokens_and_has_vllms_fields(bench: Callable[..., Result]) -> None:
    record = record_of(bench("throughput", *SHORT, "--num-prompts", 10, "--num-runs", 2, "--json"))
    assert record["num_requests"] == record["completed"] == 10
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (60, 40)
    assert record["total_num_tokens"] == 100
    assert record["elapsed_time"] == min(record["elapsed_times"])
    assert record["output_throughput"] == pytest.approx(40 / record["elapsed_time"])
    assert record["tokens_per_second"] == pytest.approx(100 / record["elapsed_time"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std", "p99"):
            assert record[f"{kind}_{name}_ms"] >= 0
    assert record["p99_e2el_ms"] <= record["elapsed_time"] * 1e3


def test_throughput_of_a_workload_uses_its_lengths(bench: Callable[..., Result], workload: Path) -> None:
    record = record_of(bench("throughput", "--workload", workload, "--json"))
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (63, 54)
    result = bench("throughput", "--workload", workload, "--num-prompts", 2)
    assert "5 in" not in result.stdout
    assert "7 in, 5 out" in result.stdout


def test_requests_arrive_at_a_rate(bench: Callable[..., Result]) -> None:
    record = record_of(bench("throughput", *SHORT, "--num-prompts", 6, "--request-rate", 50, "--json"))
    assert record["conditions"]["settings"]["request_rate"] == 50
    assert record["elapsed_time"] > 5 / 50 / 5  # not all at once


def test_startup_adds_up(bench: Callable[..., Result]) -> None:
    record = record_of(bench("startup", "--num-iters", 1, "--input-len", 6, "--json"))
    (start,) = record["starts"]
    assert sum(record["phases_s"].values()) == pytest.approx(record["start_to_first_token_s"])
    assert {"python_start", "imports", "open_engine", "tokenizer", "weights", "first_step"} <= set(
        record["phases_s"]
    )
    assert start["start_to_ready"] < start["start_to_first_token"]
    assert record["warm_startup_times"] == [start["load"]]
    assert "read no weights" in record["what"]


def test_startup_ends_with_the_error_of_the_process(bench: Callable[..., Result]) -> None:
    result = bench("startup", "--num-iters", 1, "--threads", 100_000)
    assert result.exit_code == 2
    assert "threads = 100000, but this machine has" in result.stderr


def test_sweep_names_the_knee(bench: Callable[..., Result]) -> None:
    lists = ("--batch-sizes", "1,4", "--num-tokens", "16,64")
    record = record_of(bench("sweep", *SHORT, *lists, "--json"))
    limits = [(p["max_batch_size"], p["max_num_tokens"]) for p in record["points"]]
    assert limits == [(1, 16), (1, 64), (4, 16), (4, 64)]
    best = max(record["points"], key=lambda p: p["output_throughput"] / p["median_tpot_ms"])
    assert record["knee"] == {k: best[k] for k in ("max_batch_size", "max_num_tokens")}
    assert "TPOT" in record["knee_definition"]
    text = bench("sweep", *SHORT, "--batch-sizes", "2", "--num-tokens", "64").stdout
    assert "<- knee" in text


def test_a_file_is_overwritten_only_with_force(bench: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    args = (*SHORT, "--num-iters", 1, "--no-roofline", "-o", out)
    result = bench("latency", *args)
    assert result.exit_code == 0, result.stderr
    assert f"wrote {out}" in result.stdout
    first = out.read_text()
    assert json.loads(first)["benchmark"] == "latency"
    refused = bench("latency", *args)
    assert refused.exit_code == 2
    assert "exists" in refused.stderr
    assert "--force" in refused.stderr
    assert out.read_text() == first
    assert bench("latency", *args, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("latency", "--input-len", "200", "--output-len", "57"), "200 + 57 tokens, max_seq_len is 256"),
        (("latency", "--batch-size", "1,5"), "batch-5: 5 requests, max_batch_size is 4"),
        (("latency", "--batch-size", "2", "--max-batch-size", "1"), "max_batch_size is 1"),
        (("latency", "--batch-size", "1,x"), "'x', expected numbers of at least 1"),
        (("latency", "--points", "decode-1"), "--points needs --workload"),
        (("latency", "--workload", "absent.json"), "'absent.json' cannot be read: No such file"),
        (
            ("throughput", "--input-len", "250", "--output-len", "9", "--num-prompts", "1"),
            "max_seq_len is 256",
        ),
        (("startup", "--input-len", "256"), "do not fit into max_seq_len 256"),
        (("sweep", "--batch-sizes", "8", "--num-tokens", "128"), "batch size 8, the engine's limit is 4"),
        (("sweep", "--input-len", "200"), "requests of up to 492 tokens"),
    ],
)
def test_what_cannot_run_is_refused(bench: Callable[..., Result], args: tuple[str, ...], said: str) -> None:
    result = bench(*args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "hint: " in result.stderr


def test_a_batch_that_the_pool_cannot_hold_is_refused(bench: Callable[..., Result]) -> None:
    args = ("--batch-size", "4", "--kv-cache-tokens", "128", "--no-roofline")
    result = bench("latency", "--input-len", "30", "--output-len", "9", *args)
    assert result.exit_code == 2
    assert "batch-4: 12 KV pages of 16 tokens, the pool has 8" in result.stderr


def test_workloads_that_do_not_fit_are_refused(bench: Callable[..., Result], workload: Path) -> None:
    result = bench("latency", "--workload", workload)
    assert result.exit_code == 2
    assert "decode-128: 128 requests" in result.stderr
    assert "prefill-8192: 8192 + 1 tokens" in result.stderr
    result = bench("latency", "--workload", workload, "--batch-size", "1")
    assert "--workload and --batch-size exclude each other" in result.stderr
    result = bench("latency", "--workload", workload, "--points", "decode-9")
    assert "no point is called 'decode-9'" in result.stderr
    assert "decode-4" in result.stderr
    result = bench("throughput", "--workload", workload, "--num-prompts", "10")
    assert "has 9 mixed requests, expected 10" in result.stderr
    data = json.loads(workload.read_text())
    for change, said in (
        ({"vocab": 300}, "for a vocabulary of 300 ids, the engine's has 28"),
        ({"id_check": {"seed": 5, "first8": [1, 2]}}, "follow another rule"),
        ({"version": 2}, "version is 2, expected 1"),
        ({"decode": [{"batch": 0}]}, "batch is 0, expected an integer of at least 1"),
    ):
        workload.write_text(json.dumps(data | change))
        result = bench("latency", "--workload", workload)
        assert result.exit_code == 2
        assert said in result.stderr
    workload.write_text("[]")
    assert "is not a workload" in bench("latency", "--workload", workload).stderr


# ---- the record of the budgets ----------------------------------------------------------------


def test_the_design_record_fills_up_and_its_table_shows_it(
    benchmark_program: Callable[[str], ModuleType],
    alphabet: Path,
    workload: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, table = benchmark_program("run_design_table"), benchmark_program("design_rows")
    monkeypatch.setattr(program, "WORKLOAD", workload)
    monkeypatch.setattr(table, "RECORD", tmp_path / "design_table.json")
    assert table.render().count("not measured") == len(table.ROWS)

    def run(rows: str) -> dict[str, Any]:
        args = ["--engine-1b", str(alphabet), "--rows", rows, "--out", str(tmp_path), "--commit", "abc"]
        monkeypatch.setattr(sys, "argv", ["run_design_table.py", *args])
        program.main()
        record: dict[str, Any] = json.loads((tmp_path / "design_table.json").read_text())
        return record["models"]["1b"]

    model = run("decode,prefill")
    assert set(model["figures"]) == {"decode-1", "decode-4", "prefill-100"}
    assert set(model["runs"]["decode"]["refused"]) == {"decode-128"}
    assert model["runs"]["decode"]["conditions"]["commit"] == "abc"
    model = run("mixed")
    assert set(model["figures"]) == {"decode-1", "decode-4", "prefill-100", "mixed"}
    assert model["failed"] == {}

    row = next(r for r in table.ROWS if (r.model, r.key) == ("1b", "decode-1"))
    peer = table.peers(json.loads(table.PEER.read_text()), row)
    ours = model["figures"]["decode-1"]
    (ratio,) = re.findall(rf"\| {ours:,.2f} ms \| ([\d.]+) \|", table.render())
    carried = len(f"{ours:.2f}".replace(".", "").lstrip("0"))
    assert float(ratio) == pytest.approx(peer / ours, rel=10.0 ** (1 - carried))
    assert "1B: " in table.render()
