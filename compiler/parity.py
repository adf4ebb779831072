"""Compare an engine with Hugging Face before anybody uses it.

HF's own modeling code runs with its weights streamed one module at a time from the
checkpoint; the engine runs the same tokens in the ways serving does: a chunk of prompt, then
one token at a time, all prompts batched. What is compared are logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from tapeout.compiler.graph import from_numpy
from tapeout.compiler.trace import FindWeight
from tapeout.model_defs.architecture import written_attention
from tapeout.model_defs.meta_model import load_meta_model
from tapeout.model_defs.source import ModelSource
from tapeout.model_defs.weights import run_recipe
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.manifest import Limits, ModelFacts
from tapeout.runtime.engine.reader import Engine, open_engine
from tapeout.runtime.executors import load_executor
from tapeout.runtime.kv_cache import pages_for
from tapeout.runtime.step import StepInputs

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Germany",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(",
    "Water boils at 100 degrees Celsius, which is 212 degrees Fahrenheit; it freezes at 0 degrees",
    'She opened the door, looked around the empty room and said: "Where has everybody gone',
)
PROMPT_TOKENS = 12  # prefill, in one chunk
TOTAL_TOKENS = 18  # the rest is fed one token at a time

# float32 logits are the gate (relative to the largest logit); lower precision is judged by near-ties.
FLOAT32_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Parity:
    """`manifest` holds what is deterministic (verdict, cases, tolerance); `figures` goes to the report."""

    manifest: dict[str, Any]
    figures: dict[str, Any]


class _Forward(Protocol):
    """What the comparison needs of an executor, whatever its target."""

    limits: Limits

    def forward(self, inputs: StepInputs) -> np.ndarray:
        """Run one step at once; logits [R, vocab] float32."""


SKIPPED = Parity({"verdict": "skipped", "reason": "--no-verify"}, {})
NO_GPU = Parity({"verdict": "skipped", "reason": "the build does not run cuda engines yet"}, {})
#: What an engine says of its TensorRT segments, whatever else was compared: they were not asked for more than
#: being built, or `tapeout time` ran each of them.
NOT_EXECUTED = "built; never executed, neither compared nor timed"
TIMED = "each compared with our kernels and timed by tapeout time; never executed in the engine"


def of_segments(verdict: Parity, *, timed: bool) -> Parity:
    """The verdict on an engine with TensorRT segments."""
    return Parity({**verdict.manifest, "segments": TIMED if timed else NOT_EXECUTED}, verdict.figures)


def compare(source: ModelSource, engine_path: Path, weight: FindWeight) -> Parity:
    """Run both sides and judge.

    Args:
        weight: the recipe that fills a parameter of the model.

    Raises:
        TapeoutError: the engine's output is not finite, all zero, or not HF's.
    """
    engine = open_engine(engine_path, verify=False)  # it was written a moment ago
    try:
        facts, limits = engine.manifest.model, engine.manifest.limits
        total = min(TOTAL_TOKENS, limits.max_seq_len)
        prompt = min(PROMPT_TOKENS, total - 1)
        tokens = _tokens(source, total)
        logits = _engine_logits(engine, tokens, prompt)
    finally:
        engine.close()
    _check_sane(logits)
    reference = _reference_logits(source, "float32", tokens, prompt, weight, limits.max_seq_len)
    lower = (
        None
        if facts.dtype == "float32"
        else _reference_logits(source, facts.dtype, tokens, prompt, weight, limits.max_seq_len)
    )
    cases = {"prompts": len(tokens), "prefill_tokens": prompt, "decode_tokens": total - prompt}
    return _judge(logits, reference, lower, facts, cases)


def _tokens(source: ModelSource, count: int) -> np.ndarray:
    """[prompts, count] ids: the prompts' beginnings, or random ids without a tokenizer."""
    vocab = int(source.config.get_text_config().vocab_size)
    random = np.random.default_rng(0).integers(0, vocab, (len(PROMPTS), count)).astype(np.int32)
    if source.tokenizer_json is None:
        return random
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(source.tokenizer_json)
    for row, text in zip(random, PROMPTS, strict=True):
        ids = np.array(tokenizer.encode(text).ids[:count], dtype=np.int32)
        ids = ids[ids < vocab]
        row[: len(ids)] = ids
    return random


def _engine_logits(engine: Engine, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """[prompts, tokens after `prompt` and one, vocab] from the engine, through its paged cache."""
    limits = engine.manifest.limits
    pages = pages_for(tokens.shape[1], limits.tokens_per_page)
    executor = load_executor(engine, num_pages=pages * limits.max_batch_size, release_weights=True)
    try:
        groups = [
            _run_group(executor, tokens[i : i + limits.max_batch_size], pages, prompt)
            for i in range(0, len(tokens), limits.max_batch_size)
        ]
    finally:
        executor.close()
    return np.concatenate(groups)


def _run_group(executor: _Forward, tokens: np.ndarray, pages: int, prompt: int) -> np.ndarray:
    batch, total = tokens.shape
    table = np.arange(batch * pages, dtype=np.int32)[::-1].reshape(batch, pages).copy()  # not the identity
    rows = []
    chunk = max(1, executor.limits.max_num_tokens // batch)
    for start in range(0, prompt, chunk):
        stop = min(start + chunk, prompt)
        last = _forward(executor, tokens[:, start:stop], start, table)
    rows.append(last)
    rows += [_forward(executor, tokens[:, i : i + 1], i, table) for i in range(prompt, total)]
    return np.stack(rows, axis=1)


def _forward(executor: _Forward, tokens: np.ndarray, start: int, table: np.ndarray) -> np.ndarray:
    """One step in which every sequence advances by the same tokens; logits of their last rows."""
    batch, count = tokens.shape
    slots = np.arange(batch, dtype=np.int32)
    inputs = StepInputs(
        token_ids=np.ascontiguousarray(tokens).reshape(-1).astype(np.int32),
        positions=np.tile(np.arange(start, start + count, dtype=np.int32), batch),
        cu_q=(np.arange(batch + 1) * count).astype(np.int32),
        kv_lens=np.full(batch, start + count, dtype=np.int32),
        page_table=table,
        slots=slots,
        row_ids=((slots + 1) * count - 1).astype(np.int32),
        row_slots=slots,
    )
    logits: np.ndarray = executor.forward(inputs)
    return logits


def _check_sane(logits: np.ndarray) -> None:
    if not np.isfinite(logits).all():
        bad = int((~np.isfinite(logits)).sum())
        raise TapeoutError(
            f"the engine's logits are not finite: {bad} of {logits.size} values are NaN or infinite",
            hint="check the checkpoint for NaN; a model that overflows in this dtype needs "
            "--dtype float32 or bfloat16",
        )
    if not logits.any():
        raise TapeoutError("the engine's logits are all zero", hint="check the checkpoint's weights")


def _reference_logits(
    source: ModelSource,
    dtype: str,
    tokens: np.ndarray,
    prompt: int,
    weight: FindWeight,
    max_seq_len: int,
) -> np.ndarray:
    """HF's logits at the same positions, whole sequences at once, weights streamed."""
    model = load_meta_model(source, dtype, written_attention(source.config), max_seq_len)
    _stream_weights(model, source, weight)
    ids = torch.from_numpy(tokens.astype(np.int64))
    keep = torch.arange(prompt - 1, tokens.shape[1])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
    return logits.float().numpy()


def _stream_weights(model: nn.Module, source: ModelSource, weight: FindWeight) -> None:
    """Give every module its own parameters just before it runs and take them away after.

    Peak memory is one module's parameters, whatever the size of the model.
    """

    def load(module: nn.Module, names: Sequence[tuple[str, str]]) -> None:
        for attribute, name in names:
            value = getattr(module, attribute)
            data = from_numpy(run_recipe(weight(name), source.checkpoint.read)).to(value.dtype)
            _set(module, attribute, data)

    def unload(module: nn.Module, names: Sequence[tuple[str, str]]) -> None:
        for attribute, _ in names:
            _set(module, attribute, torch.empty_like(getattr(module, attribute), device="meta"))

    for prefix, module in model.named_modules():
        kept = [
            n for n, _ in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set
        ]
        attributes = [*(n for n, _ in module.named_parameters(recurse=False)), *kept]
        own = [(a, f"{prefix}.{a}" if prefix else a) for a in attributes]
        if own:
            module.register_forward_pre_hook(lambda m, _, names=own: load(m, names))
            module.register_forward_hook(lambda m, _, __, names=own: unload(m, names))


def _set(module: nn.Module, attribute: str, data: torch.Tensor) -> None:
    """A parameter or buffer of the module by other values."""
    is_parameter = attribute in module._parameters
    setattr(module, attribute, nn.Parameter(data, requires_grad=False) if is_parameter else data)


def _judge(
    engine: np.ndarray,
    reference: np.ndarray,
    lower: np.ndarray | None,
    facts: ModelFacts,
    cases: dict[str, int],
) -> Parity:
    difference = np.abs(engine - reference)
    top = engine.argmax(-1) == reference.argmax(-1)
    figures = {
        "positions": int(top.size),
        "top1_match": float(top.mean()),
        "max_logit_difference": float(difference.max()),
        "mean_logit_difference": float(difference.mean()),
        "max_logit": float(np.abs(reference).max()),
    }
    if facts.quantize != "none":
        # Quantization changes the model on purpose; figures say how much, there is nothing to be equal to.
        return Parity({"verdict": "quantized", "cases": cases, "tolerance": None}, figures)
    if lower is None:
        allowed = FLOAT32_TOLERANCE * max(1.0, figures["max_logit"])
        fine = figures["max_logit_difference"] <= allowed
        rule = f"max |difference| <= {FLOAT32_TOLERANCE} * max(1, max |logit|)"
    else:
        error = np.abs(lower - reference).max(-1)
        figures["hf_max_logit_difference"] = float(error.max())
        ordered = np.sort(reference, axis=-1)
        gap = ordered[..., -1] - ordered[..., -2]
        fine = bool((top | (gap <= 2 * error)).all())
        rule = f"top-1 equal, or HF's float32 top-2 gap <= 2 * HF's {facts.dtype} error at that position"
    if not fine:
        raise TapeoutError(
            f"the engine's output is not Hugging Face's: top-1 equal at {figures['top1_match']:.1%} of "
            f"{figures['positions']} positions, logits differ by up to {figures['max_logit_difference']:.3g} "
            f"(allowed: {rule})",
            hint="this is a fault of the compiler for this model; --no-verify builds the engine all the same",
        )
    return Parity({"verdict": "passed", "cases": cases, "tolerance": rule}, figures)
