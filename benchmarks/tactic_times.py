"""Record which tactics an engine for a GPU runs and what they took: from the report beside the engine.

    python benchmarks/tactic_times.py ENGINE.report.json --name tactics_NAME [--rows 1,8,64,512,2048,8192]

Reads the report alone, so it runs anywhere. The record holds, for each kind of step and row count asked for,
the winner of every op with its time alone and that of the fastest other one, and for every bucket
what a step took with the fastest tactics alone and with those that were chosen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def row_of(timing: dict[str, Any]) -> dict[str, Any]:
    """A decision in short."""
    others = {name: time for name, time in timing["losers"].items() if time is not None}
    second = min(others, key=others.__getitem__, default=None)
    return {
        "signature": timing["signature"],
        "kind": timing["kind"],
        "rows": timing["rows"],
        "tactic": timing["tactic"],
        "time_us": timing["time_us"],
        "chosen": timing["chosen"],
        "fastest_other": None if second is None else {"tactic": second, "time_us": others[second]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--name", required=True, help="of the record in results/")
    parser.add_argument("--rows", default="1,8,64,512,2048,8192")
    args = parser.parse_args()
    report, rows = json.loads(args.report.read_text()), {int(n) for n in args.rows.split(",")}
    record = {
        "what": "tactics of an engine as timed on the GPU, microseconds a call; steps: a few layers in order",
        "target": report["target"],
        "dtype": report["dtype"],
        "limits": report["limits"],
        "steps": report["steps"],
        "tactics": [row_of(t) for t in report["tactics"] if t["rows"] in rows],
    }
    path = HERE / "results" / f"{args.name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}: {len(record['tactics'])} decisions")


if __name__ == "__main__":
    main()
