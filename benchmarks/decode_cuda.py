"""Decode and prefill times of a CUDA engine on this GPU, and its start.

    python benchmarks/decode_cuda.py --engine FILE --name NAME [--out DIR] [--batch 1,8,32] [--tokens 65]

A decode figure is (time for all tokens - time for the first) / (tokens - 1), the median over rounds;
a prefill figure is the time to the first token of one prompt. Prompts are random ids, new ones for
every call. Needs the runtime and cuda-bindings only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path

START = time.perf_counter()

import numpy as np  # noqa: E402  (the start of the process is part of what is measured)

from tapeout.runtime import LLM, SamplingParams  # noqa: E402


def prompts(rng: np.random.Generator, count: int, length: int, vocab: int) -> list[list[int]]:
    return [row.tolist() for row in rng.integers(0, vocab, (count, length))]


def seconds(llm: LLM, rng: np.random.Generator, batch: int, length: int, tokens: int) -> float:
    facts = llm.engine.manifest.tokenizer
    vocab = facts.vocab_size if facts else llm.engine.manifest.model.vocab_size
    ids = prompts(rng, batch, length, vocab)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(ids, params)
    elapsed = time.perf_counter() - start
    assert all(len(o.outputs[0].token_ids) == tokens for o in outputs)
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", required=True)
    parser.add_argument("--name", required=True, help="of the record")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--batch", default="1,8,32,64,128")
    parser.add_argument("--prefill", default="2048")
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=65536)
    args = parser.parse_args()

    rng = np.random.default_rng(1)
    imported = time.perf_counter()
    with LLM(args.engine, max_tokens_in_kv_cache=args.kv_tokens) as llm:
        loaded = time.perf_counter()
        seconds(llm, rng, 1, 16, 1)
        first = time.perf_counter()
        result = {
            "what": "ms per decode step and per prefill on one GPU; start-up in seconds from process start",
            "date": datetime.date.today().isoformat(),
            "model": vars(llm.engine.manifest.model),
            "target": llm.engine.manifest.target,
            "timed_tactics": llm.engine.manifest.timed,
            "gpu": vars(llm.device_facts) if hasattr(llm, "device_facts") else None,
            "startup_s": {
                "imports": imported - START,
                "load": loaded - imported,
                "first_token": first - loaded,
            },
            "modules_not_loaded": [m for m in ("torch", "triton", "transformers") if m not in sys.modules],
            "decode": [],
            "prefill": [],
        }
        for batch in map(int, args.batch.split(",")):
            seconds(llm, rng, batch, 128, 3)  # captures the buckets
            times = []
            for _ in range(args.rounds):
                one = seconds(llm, rng, batch, 128, 1)
                times.append((seconds(llm, rng, batch, 128, args.tokens) - one) / (args.tokens - 1) * 1e3)
            result["decode"].append(
                {
                    "batch": batch,
                    "prompt_tokens": 128,
                    "ms": round(statistics.median(times), 4),
                    "rounds": times,
                }
            )
            print(result["decode"][-1], flush=True)
        for length in map(int, args.prefill.split(",")):
            seconds(llm, rng, 1, length, 1)
            times = [seconds(llm, rng, 1, length, 1) * 1e3 for _ in range(args.rounds)]
            result["prefill"].append(
                {"prompt_tokens": length, "ms": round(statistics.median(times), 3), "rounds": times}
            )
            print(result["prefill"][-1], flush=True)
    path = args.out / f"{args.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(result["startup_s"], path)


if __name__ == "__main__":
    main()
