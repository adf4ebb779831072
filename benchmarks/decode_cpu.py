"""Decode speed of an engine against Hugging Face `generate`, same machine, dtype and threads.

    python benchmarks/decode_cpu.py MODEL --engine FILE [--batch 1,8] [--tokens 64] [--rounds 3]

Both sides take turns in one process, so that a busy machine slows both. Decode time is the time
for all tokens less the time for one; the figure is the median over rounds, the ratio is the median of
ratios round by round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import record
import torch

from tapeout.compiler.graph import from_numpy
from tapeout.model_defs import ModelSource, open_model
from tapeout.model_defs.meta_model import expected_tensors, load_meta_model
from tapeout.plugins.native import detect_host
from tapeout.runtime import LLM, SamplingParams

PROMPT = "The history of the printing press begins in the fifteenth century, when"


def load_hf(source: ModelSource, dtype: str) -> Any:
    """The model as transformers runs it (SDPA attention), with the source's weights."""
    model = load_meta_model(source, dtype, "sdpa")
    tied = expected_tensors(model)[1]
    state = {
        name: from_numpy(source.checkpoint.read(tied.get(name, name))).to(getattr(torch, dtype))
        for name in model.state_dict()
    }
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model


def hf_seconds(model: Any, ids: list[int], batch: int, tokens: int) -> float:
    inputs = torch.tensor([ids] * batch)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )
    assert out.shape[1] == len(ids) + tokens
    return time.perf_counter() - start


def engine_seconds(llm: LLM, ids: list[int], batch: int, tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate([ids] * batch, params)
    assert all(len(o.outputs[0].token_ids) == tokens for o in outputs)
    return time.perf_counter() - start


def decode_rate(run: Callable[[int], float], batch: int, tokens: int) -> float:
    """Tokens a second of the whole batch, prefill excluded."""
    first = run(1)
    return batch * (tokens - 1) / (run(tokens) - first)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="what the engine was built from")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--name", default="decode_cpu", help="of the record")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=detect_host().threads)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    with LLM(args.engine, threads=args.threads) as llm:
        facts = llm.engine.manifest.model
        ids = llm.tokenizer.encode(PROMPT)
        model = load_hf(open_model(args.model), facts.dtype)
        rows = []
        for batch in map(int, args.batch.split(",")):
            rates: dict[str, list[float]] = {"hf": [], "engine": []}
            for _ in range(args.rounds):
                rates["hf"].append(
                    decode_rate(lambda n, b=batch: hf_seconds(model, ids, b, n), batch, args.tokens)
                )
                rates["engine"].append(
                    decode_rate(lambda n, b=batch: engine_seconds(llm, ids, b, n), batch, args.tokens)
                )
            ratios = [e / h for e, h in zip(rates["engine"], rates["hf"], strict=True)]
            rows.append(
                {
                    "batch": batch,
                    "hf_tokens_per_s": round(statistics.median(rates["hf"]), 2),
                    "engine_tokens_per_s": round(statistics.median(rates["engine"]), 2),
                    "ratio": round(statistics.median(ratios), 3),
                    "rounds": {k: [round(r, 2) for r in v] for k, v in rates.items()},
                }
            )
            print(rows[-1], flush=True)
    result = {
        "what": "decode tokens/s of the whole batch, HF generate against the engine, in turns",
        "model": facts.architecture,
        "dtype": facts.dtype,
        "quantize": facts.quantize,
        "prompt_tokens": len(ids),
        "new_tokens": args.tokens,
        "conditions": record.conditions(args.threads),
        "results": rows,
    }
    record.write(args.name, result)


if __name__ == "__main__":
    main()
