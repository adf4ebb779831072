"""How long a process takes from exec to its first token."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tapeout.plugins.errors import CapacityError, EngineError, TapeoutError, UnsupportedError, UsageError
from tapeout.runtime.bench.first_token import BOOT
from tapeout.runtime.bench.metrics import latency_percentiles

_READ_BYTES = 16 << 20
#: The started process tells an error by its exit code.
_ERRORS = {kind.exit_code: kind for kind in (UsageError, EngineError, CapacityError, UnsupportedError)}


def read_into_page_cache(files: Iterable[Path]) -> int:
    """Read files once, so that the system holds them in memory; returns their bytes."""
    buffer, total = bytearray(_READ_BYTES), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def start_process(engine: Path, input_len: int, seed: int, runtime: Mapping[str, Any]) -> dict[str, Any]:
    """Start a process that runs one prompt to its first token.

    Returns seconds since just before its exec: `start_to_ready`, `start_to_first_token`, and `phases`, which
    add up to the latter: `python_start` (exec and interpreter), `imports`, the parts of loading (see
    `LLM.load_seconds`), `first_step` (a step's first use included), `other`.

    Raises the TapeoutError that the process ended with.
    """
    spec = {"engine": str(engine), "input_len": input_len, "seed": seed, "runtime": dict(runtime)}
    command = [sys.executable, "-c", BOOT, json.dumps(spec)]
    before = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            stdout, stderr = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        last = "\n".join(stderr.strip().splitlines()[-10:])
        raise TapeoutError(f"the started process failed with code {process.returncode}:\n{last}")
    told = json.loads(stdout.splitlines()[-1])
    if "error" in told:
        raise _ERRORS.get(told["exit_code"], TapeoutError)(told["error"], hint=told["hint"])
    whole = told["ended"] - before
    phases = {"python_start": told["started"] - before, **told["phases"]}
    phases["other"] = whole - sum(phases.values())
    return {
        "start_to_first_token": whole,
        "start_to_ready": told["ready"] - before,
        "load": told["load"],
        "phases": phases,
        "tokenizer": told["tokenizer"],
        "modules": told["modules"],
    }


def measure_startup(
    engine: Path, iterations: int, *, input_len: int, seed: int, runtime: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """One result of `start_process` after the other, each with a prompt of its own."""
    for n in range(iterations):
        yield start_process(engine, input_len, seed + n, runtime)


def startup_figures(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and all values in seconds, and the fields of `vllm bench startup` that have a counterpart:
    its startup time is that of making the LLM object; there is no compilation to time here."""
    loads = [s["load"] for s in starts]
    names = list(dict.fromkeys(name for s in starts for name in s["phases"]))
    return {
        **{
            f"{kind}_s": statistics.median(s[kind] for s in starts)
            for kind in ("start_to_first_token", "start_to_ready")
        },
        "phases_s": {name: statistics.median(s["phases"].get(name, 0.0) for s in starts) for name in names},
        "avg_warm_startup_time": statistics.fmean(loads),
        "warm_startup_times": loads,
        "warm_startup_percentiles": latency_percentiles(loads),
        "starts": starts,
    }
