"""How long a process takes from nothing to its first token, and what imports cost.

    python benchmarks/startup_cpu.py --engine FILE [--rounds 5]

Every round is a new process. `import_runtime` is `from tapeout.runtime import LLM` with the
interpreter's own start left out; `load_to_first_token` starts after all imports, torch included, and
covers opening and checking the file, tokenizer, weights, KV pool and the first step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import record

from tapeout.plugins.native import detect_host

CHILD = """
import json, sys, time
t0 = time.perf_counter()
from tapeout.runtime import LLM, SamplingParams
t1 = time.perf_counter()
heavy = sorted(m for m in ("torch", "transformers", "onnx", "tensorrt") if m in sys.modules)
import jinja2, tokenizers, torch
import tapeout.runtime.executors.cpu
t2 = time.perf_counter()
with LLM(sys.argv[1]) as llm:
    t3 = time.perf_counter()
    llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=1))
    t4 = time.perf_counter()
print(json.dumps({"import_runtime_s": t1 - t0, "import_executor_s": t2 - t1, "load_s": t3 - t2,
                  "first_token_s": t4 - t3, "load_to_first_token_s": t4 - t2, "heavy_modules": heavy}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds = []
    for _ in range(args.rounds):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, args.engine], capture_output=True, text=True, check=True
        )
        rounds.append(json.loads(child.stdout.splitlines()[-1]))
        print(rounds[-1], flush=True)
    keys = [k for k in rounds[0] if k.endswith("_s")]
    record.write(
        "startup_cpu",
        {
            "what": "seconds to the first token, a new process a round, engine file in page cache",
            "conditions": record.conditions(detect_host().threads),
            "median": {k: round(statistics.median(r[k] for r in rounds), 3) for k in keys},
            "heavy_modules_after_import": rounds[0]["heavy_modules"],
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    main()
