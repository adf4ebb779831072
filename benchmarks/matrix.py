"""How long `tapeout build --matrix` takes for SmolLM2 on a CPU and four compute capabilities.

    python benchmarks/matrix.py MODEL.gguf [--keep DIR] [--targets cpu,cuda:sm_80,...]

Each run is a new process with caches of its own (`XDG_CACHE_HOME`), empty for the first one:

    cold       no engine, no timings, no compiled kernel
    unchanged  the same again
    timed      engines and weights removed; timings and kernels are there, as on a CI runner that keeps them
    one_more   a further GPU of a compute capability that is there already

Seconds are a clock's; `cpu_seconds` are those of all processes of the run, which say what a quiet machine
would take when this one is not quiet (see `load_average`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record

from tapeout.plugins.native import detect_host

TARGETS = "cpu,cuda:sm_80,cuda:sm_89,cuda:sm_90,cuda:sm_120"
ONE_MORE = "cuda:h200"
COMMAND = (sys.executable, "-c", "from tapeout.cli.main import main; main()")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--keep", type=Path, help="work in DIR and leave it")
    parser.add_argument("--targets", default=TARGETS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tapeout-") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        measured = measure(folder, args.model.resolve(), args.targets.split(","))
    record.write(
        "matrix_cpu",
        {
            "what": "seconds of `tapeout build --matrix`, a new process a run; bytes of what is written",
            "conditions": record.conditions(detect_host().threads),
            "model": args.model.name,
            "targets": args.targets.split(","),
            **measured,
        },
    )


def measure(folder: Path, model: Path, targets: list[str]) -> dict[str, Any]:
    matrix, output = folder / "engines.yaml", folder / "engines"
    write_matrix(matrix, model, targets)
    measured = {"cold": run(folder, matrix, output), "unchanged": run(folder, matrix, output)}
    for file in (*output.glob("*/*.engine"), *output.glob("*/*.safetensors")):
        file.unlink()
    measured["timed"] = run(folder, matrix, output)
    before = set_bytes(output)
    write_matrix(matrix, model, [*targets, ONE_MORE])
    measured["one_more"] = run(folder, matrix, output)
    measured["one_more"]["target"] = ONE_MORE
    measured["one_more"]["bytes_more"] = set_bytes(output) - before
    sizes = {file.name: file.stat().st_size for file in sorted(output.glob("*/*.engine"))}
    weights = [file.stat().st_size for file in output.glob("*/*.safetensors")]
    return {"runs": measured, "engine_bytes": sizes, "weight_bytes": weights}


def write_matrix(path: Path, model: Path, targets: list[str]) -> None:
    # JSON is YAML.
    path.write_text(json.dumps({"models": {"smollm2": str(model)}, "targets": targets}))


def run(folder: Path, matrix: Path, output: Path) -> dict[str, Any]:
    """One run as a user sees it: seconds, CPU seconds, what became of the engines."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    before, start = cpu_seconds(), time.perf_counter()
    done = subprocess.run(
        [*COMMAND, "build", "--matrix", str(matrix), "-o", str(output), "--json"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds, used = time.perf_counter() - start, cpu_seconds() - before
    report = json.loads(done.stdout)
    stages = {r["title"]: r["details"].get("stage_seconds", {}) for r in report["results"]}
    told = {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used, 2),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "counts": report["counts"],
        "engine_seconds": {r["title"]: round(r["seconds"], 2) for r in report["results"]},
        "stage_seconds": {
            t: {n: round(s, 2) for n, s in found.items()} for t, found in stages.items() if found
        },
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in report["results"]),
    }
    print(json.dumps(told), flush=True)
    return told


def cpu_seconds() -> float:
    """Of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def set_bytes(output: Path) -> int:
    """Bytes of the files that make up the sets: what a store would hold."""
    files = [*output.glob("*/*.engine"), *output.glob("*/*.safetensors"), *output.glob("*/index.json")]
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    main()
