"""A simulated day of many requests through `tapeout simulate`: seconds and memory.

    python benchmarks/simulated_day.py [--requests 1000000,100000] [--policy guaranteed_no_evict] [--trace]

The workload is written first: arrivals over a day of steps of 100 ms, more of them by day than by night,
prompts and outputs of lengths drawn from log-normal distributions. Then a process runs
`tapeout simulate FILE --summary`, with --trace once more while the trace is written. Memory is that process's
own, as it goes and at its peak: with more requests it stays where it was but for eight bytes a line, by which
ids that are given twice are found. CPU time grows with what others do on the machine; `calibration_us` (see
record.py) tells by how much.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

STEPS = 86_400 * 10  # a day of 100 ms steps
OPTIONS = {"pages": 16_384, "tokens_per_page": 32, "max_batch_size": 256, "max_num_tokens": 2_048}
_MEAN_PROMPT, _MEAN_OUTPUT = 180, 60
_WATCH_SECONDS = 5


def write_workload(path: Path, requests: int, seed: int = 0) -> dict[str, int]:
    """Requests in order of arrival; what they add up to."""
    draw = np.random.default_rng(seed)
    # Twice the mean at noon, next to nothing at midnight: 1 - cos of the time of day, by rejection.
    steps = draw.integers(0, STEPS, 3 * requests)
    busy = draw.random(len(steps)) * 2 < 1 - np.cos(2 * np.pi * steps / STEPS)
    arrivals = np.sort(steps[busy][:requests])
    assert len(arrivals) == requests
    prompts = np.clip(draw.lognormal(np.log(_MEAN_PROMPT), 0.9, requests), 1, 16_000).astype(int)
    outputs = np.clip(draw.lognormal(np.log(_MEAN_OUTPUT), 0.8, requests), 1, 2_000).astype(int)
    with path.open("w") as file:
        for i, (a, p, o) in enumerate(
            zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        ):
            line = {"id": f"q{i}", "arrival_step": a, "prompt_tokens": p, "max_tokens": o}
            file.write(json.dumps(line) + "\n")
    return {"requests": requests, "prompt_tokens": int(prompts.sum()), "output_tokens": int(outputs.sum())}


def run(workload: Path, policy: str, trace: Path | None = None) -> dict[str, Any]:
    """One process: its wall and CPU seconds, its peak memory, and the summary it printed."""
    code = "from tapeout.cli.main import main; main()"
    options = [
        word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [
        sys.executable,
        "-c",
        code,
        "simulate",
        str(workload),
        "--policy",
        policy,
        "--summary",
        "--json",
    ]
    calibration, start = record.calibration_us(), time.perf_counter()
    curve: list[list[float]] = []
    with subprocess.Popen(
        [*command, *options, *(["--trace", str(trace)] if trace else [])], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        threading.Thread(target=_watch, args=(process.pid, start, curve), daemon=True).start()
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    summary = json.loads(text)["summary"]
    seconds = time.perf_counter() - start
    return {
        "wall_seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "cpu_us_per_step": round((usage.ru_utime + usage.ru_stime) / summary["steps"] * 1e6, 1),
        "calibration_us": [calibration, record.calibration_us()],
        "peak_rss_mib": max(peak for _, _, peak in curve),
        "seconds_rss_mib": [[second, resident] for second, resident, _ in curve],
        "summary": {name: value for name, value in summary.items() if name != "settings"},
    }


def _watch(pid: int, start: float, curve: list[list[float]]) -> None:
    """Notes seconds, resident MiB and the most so far of a process whenever they change, until it ends."""
    status = Path(f"/proc/{pid}/status")
    while True:
        time.sleep(_WATCH_SECONDS)
        try:
            words = dict(line.split(":", 1) for line in status.read_text().splitlines())
            # Not the peak that `wait4` tells: a process is born with its parent's.
            resident, peak = (round(int(words[name].split()[0]) / 1024, 1) for name in ("VmRSS", "VmHWM"))
        except (OSError, KeyError):  # it has ended
            return
        if not curve or curve[-1][1:] != [resident, peak]:
            curve.append([round(time.perf_counter() - start), resident, peak])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", default="1000000,100000")
    parser.add_argument("--policy", default="guaranteed_no_evict")
    parser.add_argument("--trace", action="store_true", help="run every size with a trace, too")
    parser.add_argument("--name", default="simulated_day", help="of the record")
    args = parser.parse_args()
    runs, conditions = [], record.conditions(threads=1)  # of the code that is loaded now
    with tempfile.TemporaryDirectory() as folder:
        for requests in map(int, args.requests.split(",")):
            workload = Path(folder) / "day.jsonl"
            facts = write_workload(workload, requests)
            runs.append({**facts, **run(workload, args.policy)})
            print(json.dumps(runs[-1]), flush=True)
            if args.trace:
                trace = Path(folder) / "trace.jsonl"
                runs.append({**facts, "with_trace": True, **run(workload, args.policy, trace)})
                runs[-1]["trace_bytes"] = trace.stat().st_size
                print(json.dumps(runs[-1]), flush=True)
    record.write(
        args.name,
        {
            "what": "a day of 100 ms steps simulated by `tapeout simulate --summary`",
            "conditions": conditions,
            "settings": {"policy": args.policy, **OPTIONS},
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
