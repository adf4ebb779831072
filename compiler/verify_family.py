"""Compare a family's tiny random model with Hugging Face: greedy ids and logits, alone and batched.

The model is built for the `cpu` target in float32 and run as users run it (chunks of prompt, then single
tokens, requests batched as they come); logits are compared on the sequences that Hugging Face's own code
generates, in float32, without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from tapeout.compiler.build import build
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.parity import FLOAT32_TOLERANCE
from tapeout.model_defs.architecture import written_attention
from tapeout.model_defs.families import Family, Verification
from tapeout.model_defs.tiny import VOCAB_SIZE, tiny_config, write_tiny
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine.reader import open_engine
from tapeout.runtime.executors import load_executor
from tapeout.runtime.kv_cache import pages_for
from tapeout.runtime.step import StepInputs

_FIRST_ORDINARY_ID = 5  # below are the tiny tokenizer's special tokens
_PAGE_TOKENS, _MAX_NUM_TOKENS = 8, 32  # small, so that prompts cross pages and come in chunks


@dataclass(frozen=True)
class FamilyResult:
    """What was found; `parity` is `exact` (ids equal, logits within tolerance), `tolerance` (logits within
    tolerance, ids differ where two are nearly equal) or `none`."""

    family: str
    architecture: str
    model_type: str
    traced: bool
    parity: str
    max_abs_logit_diff: float | None
    notes: str


def verify_family(family: Family, *, seed: int = 0, timing_cache: Path | None = None) -> FamilyResult:
    """Make the family's tiny checkpoint and compare. What the model or the compiler cannot do is a result.

    Args:
        seed: of weights and prompts.
        timing_cache: of the tiny models' ops; None times them anew.
    """
    architecture, traced, folder = "", False, ""
    try:
        config = tiny_config(family.model_type, **family.config)
        with TemporaryDirectory(prefix="tapeout-verify-") as folder:
            checkpoint, engine = Path(folder) / "model", Path(folder) / "model.engine"
            write_tiny(checkpoint, config, seed=seed)
            model = _reference(checkpoint)
            architecture = type(model).__name__
            prompts = _prompts(family.verify, seed)
            ids, logits = _greedy(model, prompts, family.verify.new_tokens)
            build(str(checkpoint), engine, _options(family.verify, len(prompts), timing_cache))
            traced = True
            difference, most = _logit_difference(engine, prompts, ids, logits)
            same = _same_ids(engine, prompts, ids)
    except TapeoutError as error:
        notes = error.message.strip().replace(f"{folder}/", "")
        return FamilyResult(family.name, architecture, family.model_type, traced, "none", None, notes)
    allowed = FLOAT32_TOLERANCE * max(1.0, most)
    fine = difference <= allowed
    parity = "none" if not fine else "exact" if same else "tolerance"
    notes = "" if fine else f"logits differ by {difference:.3g}, allowed are {allowed:.3g}"
    return FamilyResult(
        family.name, architecture, family.model_type, True, parity, float(f"{difference:.2e}"), notes
    )


def _options(verify: Verification, batch: int, timing_cache: Path | None) -> BuildOptions:
    longest = max(verify.prompt_lengths) + verify.new_tokens
    return BuildOptions(
        target="cpu",
        dtype="float32",
        max_batch_size=batch,
        max_num_tokens=_MAX_NUM_TOKENS,
        max_seq_len=verify.max_seq_len or longest + 1,
        tokens_per_page=_PAGE_TOKENS,
        timing_cache=timing_cache,
        verify=False,
    )


def _reference(checkpoint: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    attention = written_attention(AutoConfig.from_pretrained(checkpoint))
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation=attention, experts_implementation="eager"
    )
    return model.eval()


def _prompts(verify: Verification, seed: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(_FIRST_ORDINARY_ID, VOCAB_SIZE, n).tolist() for n in verify.prompt_lengths]


def _greedy(
    model: Any, prompts: Sequence[Sequence[int]], count: int
) -> tuple[list[list[int]], list[np.ndarray]]:
    """`count` greedy ids a prompt, and the logits `[count, vocab]` that chose them."""
    all_ids, all_logits = [], []
    for prompt in prompts:
        ids, rows = list(prompt), []
        for _ in range(count):
            with torch.no_grad():
                rows.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float())
            ids.append(int(rows[-1].argmax()))
        all_ids.append(ids[len(prompt) :])
        all_logits.append(torch.stack(rows).numpy())
    return all_ids, all_logits


def _same_ids(engine: Path, prompts: Sequence[list[int]], ids: Sequence[list[int]]) -> bool:
    """Whether the engine generates these ids, each prompt alone and all of them at once."""
    params = SamplingParams(temperature=0.0, max_tokens=len(ids[0]), ignore_eos=True)
    with LLM(engine) as llm:
        batched = [list(r.outputs[0].token_ids) for r in llm.generate(list(prompts), params)]
        alone = [list(llm.generate([p], params)[0].outputs[0].token_ids) for p in prompts]
    return batched == list(ids) and alone == list(ids)


def _logit_difference(
    path: Path, prompts: Sequence[list[int]], ids: Sequence[list[int]], expected: Sequence[np.ndarray]
) -> tuple[float, float]:
    """Largest difference along the generated ids, alone and batched; and the largest logit."""
    worst, most = 0.0, max(float(np.abs(e).max()) for e in expected)
    engine = open_engine(path, verify=False)
    try:
        limits = engine.manifest.limits
        pages = pages_for(limits.max_seq_len, limits.tokens_per_page)
        executor = load_executor(engine, num_pages=pages * limits.max_batch_size)
        try:
            for group in [*([i] for i in range(len(prompts))), list(range(len(prompts)))]:
                sequences = [prompts[i] + ids[i][:-1] for i in group]
                starts = [len(prompts[i]) for i in group]
                for row, i in zip(_forced(executor, sequences, starts, pages), group, strict=True):
                    difference = np.abs(row - expected[i])
                    worst = max(worst, float(difference.max()) if np.isfinite(row).all() else np.inf)
        finally:
            executor.close()
    finally:
        engine.close()
    return worst, most


def _forced(
    executor: Any, sequences: Sequence[list[int]], starts: Sequence[int], pages: int
) -> list[np.ndarray]:
    """Logits after each token from the prompt's last on, for sequences of which all ids are known.

    Steps hold as many prompt tokens as fit, the first sequences' first; a sequence whose prompt is done
    advances by one token a step.
    """
    room = executor.limits.max_num_tokens
    table = np.arange(len(sequences) * pages, dtype=np.int32)[::-1].reshape(len(sequences), pages).copy()
    done = [0] * len(sequences)
    rows: list[list[np.ndarray]] = [[] for _ in sequences]
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        left, counts = room, []
        for sequence, start, at in zip(sequences, starts, done, strict=True):
            wanted = min(start - at, left) if at < start else min(1, len(sequence) - at, left)
            counts.append(wanted)
            left -= wanted
        active = [i for i, n in enumerate(counts) if n]
        logits = _step(executor, sequences, done, counts, active, table)
        for i, row in zip(active, logits, strict=True):
            done[i] += counts[i]
            if done[i] >= starts[i]:
                rows[i].append(row)
    return [np.stack(r) for r in rows]


def _step(
    executor: Any,
    sequences: Sequence[list[int]],
    done: Sequence[int],
    counts: Sequence[int],
    active: Sequence[int],
    table: np.ndarray,
) -> np.ndarray:
    """One step that advances each active sequence by its count; logits of their last rows."""
    spans = [range(done[i], done[i] + counts[i]) for i in active]
    ends = np.cumsum([len(s) for s in spans])
    slots = np.arange(len(active), dtype=np.int32)
    inputs = StepInputs(
        token_ids=np.array(
            [sequences[i][p] for i, s in zip(active, spans, strict=True) for p in s], np.int32
        ),
        positions=np.array([p for s in spans for p in s], np.int32),
        cu_q=np.array([0, *ends], np.int32),
        kv_lens=np.array([s.stop for s in spans], np.int32),
        page_table=table[list(active)],
        slots=slots,
        row_ids=(ends - 1).astype(np.int32),
        row_slots=slots,
    )
    logits: np.ndarray = executor.forward(inputs).copy()
    return logits
