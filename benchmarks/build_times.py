"""Record what builds of engines for a GPU took, stage by stage: from the reports beside the engines.

    python benchmarks/build_times.py REPORT.json ... --where TEXT --commit SHA --key KEY

Reads the reports alone, so it runs anywhere. `--where` says on which machine the builds ran and with what
at hand (timings, compiled kernels), which the report leaves out on purpose; `--process-seconds` what a clock
outside said from exec to exit, imports included, report by report. Adds to `build_gpu.json` under
`--key`; what stands there under another key is kept.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "results" / "build_gpu.json"
WHAT = "seconds of tapeout build for a GPU by stage, and its peak memory"


def row_of(report: dict[str, Any], process_seconds: float | None) -> dict[str, Any]:
    """A build in short; `seconds` are those of its stages."""
    stages = {name: round(seconds, 2) for name, seconds in report["stage_seconds"].items()}
    tried = sum(1 + len(timing["losers"]) for timing in report["tactics"])
    return {
        "engine": Path(report["engine"]).name,
        "target": report["target"],
        "dtype": report["dtype"],
        "limits": report["limits"],
        "timed": report["timed"],
        "stage_seconds": stages,
        "seconds": round(sum(report["stage_seconds"].values()), 2),
        "process_seconds": process_seconds,
        "peak_memory_bytes": report["peak_memory_bytes"],
        "file_bytes": report["file_bytes"],
        "tactics": {"decisions": len(report["tactics"]), "candidates": tried},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--where", required=True, help="machine and what was at hand")
    parser.add_argument("--commit", required=True, help="of the code that built")
    parser.add_argument("--key", required=True, help="in the record")
    parser.add_argument("--process-seconds", type=float, nargs="+", help="from exec to exit, by report")
    args = parser.parse_args()
    process_seconds = args.process_seconds or [None] * len(args.reports)
    if len(process_seconds) != len(args.reports):
        parser.error(f"--process-seconds: {len(process_seconds)} given for {len(args.reports)} reports")
    record = json.loads(PATH.read_text()) if PATH.exists() else {"what": WHAT, "builds": {}}
    record["builds"][args.key] = {
        "date": datetime.date.today().isoformat(),
        "commit": args.commit,
        "where": args.where,
        "engines": [
            row_of(json.loads(path.read_text()), seconds)
            for path, seconds in zip(args.reports, process_seconds, strict=True)
        ],
    }
    PATH.write_text(json.dumps(record, indent=1) + "\n")
    print("wrote", PATH)


if __name__ == "__main__":
    main()
