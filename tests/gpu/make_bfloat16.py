"""The bfloat16 families' part of the bundle: Hugging Face's ids and how far its own bfloat16 is from its
float32, the CPU float32 engine's logits, and the GPU's bfloat16 engine.

Used by make_bundle.py, where the compiler is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gpu_bfloat16 import NEW_TOKENS, PIECE_TOKENS, bfloat16_file, is_near_tie
from gpu_cases import LIMITS, PAGES, histories_of_steps, logits_of_steps, rms
from make_families import build_tiny, write_checkpoint

from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine import open_engine
from tapeout.runtime.executors import load_executor

_SEEDS = 10
#: Of all ids so many must stand before their piece's first near tie, or the comparison would say little; with
#: the first seed of so many as are wanted no other is tried.
_LEAST_DECIDED, _WANTED_DECIDED = 0.4, 0.6


def make_bfloat16(name: str, target: str, engine: Path, work: Path) -> dict[str, Any]:
    """Write the bfloat16 engine of a family for `target`; `work` is a folder for what does not stay.

    Returns:
        The seed; `pieces` by name, as `gpu_bfloat16.near_ties` takes them, with their prompts; by step
        `logits` of the CPU's float32 engine and `hf_errors`, of HF's bfloat16, as parts of the root mean
        square.
    """
    file, model = bfloat16_file(name), work / "model"
    best: tuple[float, int, dict[str, Any]] = (0.0, 0, {})
    for seed in range(_SEEDS):
        write_checkpoint(file, seed, model)
        prompts = [list(asked[0].prompt) for asked in file.case(seed).rounds[:-1]]
        found = _greedy(model, prompts)
        best = max(best, (_decided(found), -seed, found), key=lambda item: item[:2])
        if best[0] >= _WANTED_DECIDED:
            break
    decided, negative_seed, known = best
    assert decided >= _LEAST_DECIDED, f"{name}: {decided:.0%} of the ids at most stand before near ties"
    write_checkpoint(file, -negative_seed, model)
    cpu = work / "cpu.engine"
    build_tiny(str(model), cpu, "cpu", work / "timings.json", dtype="float32", **LIMITS)
    assert _ids(cpu, known) == [piece["greedy"] for piece in known.values()], (
        f"{name}: the CPU has not HF's ids"
    )
    build_tiny(str(model), engine, target, work / "timings.json", dtype="bfloat16", **LIMITS)
    with open_engine(cpu) as opened:
        executor = load_executor(opened, num_pages=PAGES * LIMITS["max_batch_size"])
        logits = {step: values.tolist() for step, values in logits_of_steps(executor).items()}
        executor.close()
    return {
        "seed": -negative_seed,
        "decided": decided,
        "pieces": known,
        "logits": logits,
        "hf_errors": _errors_of_steps(model),
    }


def _load(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def _logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Float32 [ids, VOCAB_SIZE]."""
    import torch

    with torch.no_grad():
        found: np.ndarray = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    return found


def _greedy(folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """By name a piece of HF's greedy ids, the gaps that decided them, and what its bfloat16 differs there."""
    exact, half = _load(folder, "float32"), _load(folder, "bfloat16")
    known = {}
    for number, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(_logits(exact, ids)[-1].argmax()))
        # One forward of the whole: what chose each of the ids.
        of_exact, of_half = (_logits(model, ids[:-1])[len(prompt) - 1 :] for model in (exact, half))
        best = np.sort(of_exact)[:, -2:]
        gaps, errors = best[:, 1] - best[:, 0], np.abs(of_half - of_exact).max(-1)
        for start in range(0, NEW_TOKENS, PIECE_TOKENS):
            first, stop = len(prompt) + start, start + PIECE_TOKENS
            known[f"{number} from {start}"] = {
                "prompt": ids[:first],
                "greedy": ids[first : first + PIECE_TOKENS],
                "gaps": gaps[start:stop].tolist(),
                "bf16_errors": errors[start:stop].tolist(),
            }
    return known


def _decided(known: Mapping[str, Any]) -> float:
    """Part of the ids that stand before their piece's first near tie."""
    counts = []
    for piece in known.values():
        ties = [is_near_tie(*pair) for pair in zip(piece["gaps"], piece["bf16_errors"], strict=True)]
        counts.append((ties.index(True) if True in ties else len(ties)) / len(ties))
    return sum(counts) / len(counts)


def _ids(engine: Path, known: Mapping[str, Any]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=PIECE_TOKENS, ignore_eos=True)
    with LLM(engine) as llm:
        outputs = llm.generate([{"prompt_token_ids": p["prompt"]} for p in known.values()], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _errors_of_steps(folder: Path) -> dict[str, float]:
    """How far HF's bfloat16 logits are from its float32 ones, by step of `logits_of_steps`."""
    exact, half = _load(folder, "float32"), _load(folder, "bfloat16")
    errors = {}
    for step, histories in histories_of_steps().items():
        wanted = np.stack([_logits(exact, ids)[-1] for ids in histories])
        got = np.stack([_logits(half, ids)[-1] for ids in histories])
        errors[step] = rms(got - wanted) / rms(wanted)
    return errors
