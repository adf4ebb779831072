"""Where a measurement was made, and writing it down under `benchmarks/results/`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tapeout.compiler.choose import cpu_name

RESULTS = Path(__file__).parent / "results"


def conditions(threads: int) -> dict[str, Any]:
    """Date, commit, machine and versions of a run; the load average says whether others were busy."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=RESULTS, check=False
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "tapeout")},
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """Write `results/<name>.json`, the newest run of that benchmark."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    return path
