"""What prefill does at the card's power limit: clocks, watts and times while steps are replayed.

    python benchmarks/power_limit.py --engine FILE [--tokens 8192] [--seconds 6] [--mixed 8192,2048]

Needs the runtime, nvidia-smi and the first GPU. Writes `power_limit.json`: prompts of `--tokens` tokens, one
after the other, with the time of each and samples of the card every tenth of a second, first from rest, then
as it goes on; and the many requests of `peers/workload.json` at every step size of `--mixed`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.bench.conditions import conditions
from tapeout.runtime.bench.measured_llm import MeasuredLLM
from tapeout.runtime.bench.throughput import measure_throughput, workload_requests
from tapeout.runtime.bench.workload import read_workload

HERE = Path(__file__).parent
WORKLOAD = HERE / "peers" / "workload.json"
_QUERY = "power.draw.instant,clocks.sm,clocks.mem,temperature.gpu,clocks_event_reasons.sw_power_cap"
_REST_SECONDS = 3.0
_FIRST_PROMPTS = 3


def watch(seconds: float) -> subprocess.Popen[str]:
    """nvidia-smi, a line every tenth of a second."""
    command = [
        "nvidia-smi",
        "-i",
        "0",
        f"--query-gpu={_QUERY}",
        "--format=csv,noheader,nounits",
        "-lms",
        "100",
    ]
    return subprocess.Popen(["timeout", str(seconds), *command], stdout=subprocess.PIPE, text=True)


def samples(watcher: subprocess.Popen[str]) -> list[dict[str, Any]]:
    found = []
    for line in watcher.communicate()[0].splitlines():
        watts, sm, memory, degrees, capped = (part.strip() for part in line.split(","))
        found.append(
            {
                "power_w": float(watts), "sm_mhz": int(sm), "memory_mhz": int(memory),
                "celsius": int(degrees), "power_capped": capped == "Active",
            }
        )  # fmt: skip
    return found


def prefill(llm: LLM, tokens: int, seconds: float) -> dict[str, Any]:
    """Prompts one after the other, after a rest."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    vocab_size = llm.engine.manifest.model.vocab_size

    def prompt() -> list[list[int]]:
        return [rng.integers(0, vocab_size, tokens).tolist()]

    llm.generate(prompt(), params)
    time.sleep(_REST_SECONDS)
    prompts = [prompt() for _ in range(2 * int(seconds / 0.05))]
    watcher = watch(seconds + 1)
    time.sleep(0.5)  # it has begun to look
    times, begin = [], time.perf_counter()
    for ids in prompts:
        start = time.perf_counter()
        llm.generate(ids, params)
        times.append(time.perf_counter() - start)
        if time.perf_counter() - begin > seconds:
            break
    return {
        "tokens": tokens,
        "first_ms": [round(1e3 * t, 2) for t in times[:_FIRST_PROMPTS]],
        "last_half_median_ms": round(1e3 * statistics.median(times[len(times) // 2 :]), 2),
        "prompts": len(times),
        "card": samples(watcher),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt (%(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of prefill (%(default)s)")
    parser.add_argument("--mixed", default="", help="tokens a step to run the workload with, by commas")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the record")
    asked = parser.parse_args()
    record: dict[str, Any] = {"benchmark": "power_limit", "what": (__doc__ or "").splitlines()[0]}
    with MeasuredLLM(asked.engine) as llm:
        settings = {"tokens": asked.tokens, "seconds": asked.seconds, "mixed": asked.mixed}
        record["conditions"] = conditions(llm.engine, settings)
        workload = read_workload(WORKLOAD, llm.engine.manifest.model.vocab_size)
        record["prefill"] = prefill(llm, asked.tokens, asked.seconds)
    record["mixed"], requests = [], workload_requests(workload, None)
    for tokens in map(int, filter(None, asked.mixed.split(","))):
        with MeasuredLLM(asked.engine, max_num_tokens=tokens) as llm:
            figures = measure_throughput(llm, requests, max_concurrency=None, runs=1, warmups=512)
        record["mixed"].append({"max_num_tokens": tokens, "output_throughput": figures["output_throughput"]})
        print(record["mixed"][-1])
    path = asked.out / "power_limit.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print("wrote", path)


if __name__ == "__main__":
    main()
