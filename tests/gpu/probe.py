"""Runs an engine in a process of its own and prints, as JSON, its ids and the heavy modules it holds.

    python probe.py ENGINE [--short]

Prompts meet in mixed steps and decode; one request takes the full kernels of sampling.
"""

from __future__ import annotations

import json
import sys

from tapeout.runtime import LLM, SamplingParams

HEAVY = ("torch", "triton", "transformers", "tapeout.compiler", "tapeout.model_defs", "tensorrt", "onnx")


def ask(engine: str, *, short: bool) -> list[list[int]]:
    prompts = [[7 + i for i in range(n)] for n in ((40, 3) if short else (70, 5, 33, 1, 18))]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, ignore_eos=True, max_tokens=3 if short else 12)
        for i in range(len(prompts))
    ]
    with LLM(engine) as llm:
        answers = llm.generate(prompts, params)
        if not short:
            extras = {"repetition_penalty": 1.3, "min_tokens": 2, "logprobs": 2}
            last = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3, **extras)
            answers += llm.generate(prompts[:1], last)
    return [list(a.outputs[0].token_ids) for a in answers]


if __name__ == "__main__":
    ids = ask(sys.argv[1], short="--short" in sys.argv)
    print(json.dumps({"ids": ids, "heavy": sorted(set(HEAVY) & sys.modules.keys())}))
