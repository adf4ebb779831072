"""Where a measurement was made, and writing it down under `benchmarks/results/`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

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


def calibration_us() -> list[float]:
    """Least and median CPU microseconds of a fixed piece of Python and NumPy, much like what schedulers do.

    CPU time of the same work grows with what others do to caches and to the core's other thread: two records
    compare by the ratio of their calibrations.
    """
    slots, numbers, results = np.arange(256), np.ones(256, np.int32), []
    for _ in range(50):
        start = time.thread_time()
        for _ in range(40):
            (numbers[slots] >= numbers).any()
            dict.fromkeys([i * 2 for i in range(100)])
        results.append((time.thread_time() - start) / 40 * 1e6)
    return [round(x, 2) for x in (min(results), float(np.median(results)))]


def write(name: str, result: dict[str, Any]) -> Path:
    """Write `results/<name>.json`, the newest run of that benchmark."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    return path
