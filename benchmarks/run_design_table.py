"""Measure what the budgets of GPU engines are about: start, decode, prefill, many requests.

    python benchmarks/run_design_table.py --engine-8b FILE --engine-1b FILE [--rows decode,mixed] [--out DIR]

Needs the runtime only. Runs the points of `peers/workload.json` through the functions of `tapeout bench`
and writes one record, `design_table.json`, with every run's conditions. What it says about another model,
or a row of the same engine that is not run now, is kept: it may be filled in several runs. Decode needs an
engine for 128 requests in flight, prefill one for 8193 tokens a request; what an engine cannot run is
recorded with the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.runtime.bench.latency import check_batches, workload_batches
from tapeout.runtime.bench.records import latency_record, startup_record, throughput_record
from tapeout.runtime.bench.throughput import check_requests, workload_requests
from tapeout.runtime.bench.workload import Workload, read_workload
from tapeout.runtime.engine import open_engine

HERE = Path(__file__).parent
WORKLOAD = HERE / "peers" / "workload.json"
ROWS = ("startup", "decode", "prefill", "mixed")
MIXED_RUNS = 2  # as the peer's record: the faster of two


def startup(engine: Path, workload: Workload) -> tuple[dict[str, Any], dict[str, float]]:
    record = startup_record(engine, 5, input_len=128, seed=0, runtime={}, progress=print)
    return record, {"startup": record["start_to_first_token_s"]}


def points(kind: str) -> Callable[[Path, Workload], tuple[dict[str, Any], dict[str, float]]]:
    """Measures the decode or the prefill points that the engine's limits allow."""

    def measure(engine: Path, workload: Workload) -> tuple[dict[str, Any], dict[str, float]]:
        with open_engine(engine, verify=False) as opened:
            limits = opened.manifest.limits
        batches = workload_batches(workload, [p for p in workload.points if p.kind == kind], None)
        refused = {}
        for batch in batches:
            try:
                check_batches([batch], limits, None)
            except TapeoutError as error:
                refused[batch.name] = error.message
        fitting = [batch for batch in batches if batch.name not in refused]
        if not fitting:
            raise UsageError("\n".join(refused.values()))
        record = latency_record(
            engine,
            fitting,
            warmup=1,
            measure_bandwidth=kind == "decode",
            workload=workload,
            runtime={},
            progress=print,
        )
        figures = {
            p["name"]: p["ms_per_decode_step"]
            if kind == "decode"
            else statistics.median(p["latencies"]) * 1e3
            for p in record["points"]
        }
        return {**record, "refused": refused}, figures

    return measure


def mixed(engine: Path, workload: Workload) -> tuple[dict[str, Any], dict[str, float]]:
    requests = workload_requests(workload, None)
    with open_engine(engine, verify=False) as opened:
        check_requests(requests, opened.manifest.limits)
    record = throughput_record(
        engine,
        requests,
        max_concurrency=None,
        request_rate=None,
        runs=MIXED_RUNS,
        warmups=None,
        workload=workload,
        dataset={},
        runtime={},
        progress=print,
    )
    return record, {"mixed": record["output_throughput"]}


MEASURES = {"startup": startup, "decode": points("decode"), "prefill": points("prefill"), "mixed": mixed}


def measure_model(
    engine: Path, rows: list[str], before: dict[str, Any], commit: str | None
) -> dict[str, Any]:
    """The model's part of the record: every run's own record, all figures, what failed and why.

    `before`: what the record said so far; kept where it is about the same engine.
    """
    with open_engine(engine, verify=False) as opened:
        workload = read_workload(WORKLOAD, opened.manifest.model.vocab_size)
        digest = opened.digest
    same = before.get("conditions", {}).get("engine", {}).get("sha256") == digest
    model: dict[str, Any] = before if same else {"runs": {}, "failed": {}}
    for row in rows:
        print(f"{engine.name}: {row}", flush=True)
        for kept in ("runs", "failed"):
            model[kept].pop(row, None)
        try:
            run, figures = MEASURES[row](engine, workload)
        except TapeoutError as error:
            print(f"failed: {error.message}")
            model["failed"][row] = error.message
            continue
        if commit is not None:
            run["conditions"]["commit"] = commit
        model["conditions"] = run["conditions"]
        model["runs"][row] = {"figures": figures, **run}
        print(figures, flush=True)
    model["figures"] = {key: value for run in model["runs"].values() for key, value in run["figures"].items()}
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-8b", type=Path, help="of Llama-3.1-8B's shape")
    parser.add_argument("--engine-1b", type=Path, help="of Llama-3.2-1B's shape")
    parser.add_argument("--rows", default=",".join(ROWS), help="some of %(default)s")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the record")
    parser.add_argument("--commit", help="where the checkout's own is not known")
    args = parser.parse_args()
    rows = args.rows.split(",")
    if unknown := sorted(set(rows) - set(ROWS)):
        parser.error(f"no row is called {', '.join(unknown)}, expected some of {', '.join(ROWS)}")
    engines = {"8b": args.engine_8b, "1b": args.engine_1b}
    if not any(engines.values()):
        parser.error("give --engine-8b or --engine-1b, or both")
    path = args.out / "design_table.json"
    record = json.loads(path.read_text()) if path.exists() else {"models": {}}
    record["what"] = "figures of the budgets of GPU engines, over peers/workload.json; runs hold all of them"
    for name, engine in engines.items():
        if engine is not None:
            record["models"][name] = measure_model(engine, rows, record["models"].get(name, {}), args.commit)
            path.write_text(json.dumps(record, indent=1) + "\n")
            print(f"wrote {path}", flush=True)


if __name__ == "__main__":
    main()
