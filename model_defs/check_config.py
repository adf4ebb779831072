"""What config.json and generation_config.json must hold, checked before transformers reads them.

transformers accepts most values and fails with them much later, by a TypeError or a division by zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import SamplingParams, shown

# Counts that every family's arithmetic divides by or allocates from, by HF's and GPT-2's names.
_COUNTS = (
    "hidden_size", "n_embd", "intermediate_size", "num_hidden_layers", "n_layer", "num_attention_heads",
    "n_head", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "n_positions",
)  # fmt: skip
_MAX_COUNT = 2**31


def check_raw_config(raw: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError naming the file and every key whose value no model can have."""
    problems = []
    if not isinstance(model_type := raw.get("model_type"), str | None):
        problems.append(f"model_type is {shown(model_type)}, expected text")
    for key in ("architectures", "layer_types"):
        value = raw.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            problems.append(f"{key} is {shown(value)}, expected a list of text")
    if not isinstance(auto_map := raw.get("auto_map"), dict | None):
        problems.append(f"auto_map is {shown(auto_map)}, expected an object")
    for key in _COUNTS:
        value = raw.get(key)
        values = value if isinstance(value, list) and value else [value]  # a list has one for each layer
        if value is not None and not all(type(v) is int and 1 <= v < _MAX_COUNT for v in values):
            problems.append(f"{key} is {shown(value)}, expected a positive integer")
    if problems:
        raise UsageError(
            "\n".join(f"{path}: {problem}" for problem in problems),
            hint="compare the file with the model's original one, or download it again",
        )


def check_generation(generation: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError for sampling defaults that `tapeout run` would refuse for every request."""
    problems = [
        f"  {key} = {shown(generation[key])}, expected a token id or a list of them"
        for key in ("eos_token_id", "bos_token_id", "pad_token_id")
        if token_ids(generation.get(key)) is None
    ]
    try:
        # A file says nothing of sampling while do_sample is off, but its values must still be ones.
        SamplingParams.from_generation({**generation, "do_sample": True})
    except UsageError as error:
        problems += [line for line in error.message.splitlines() if line.startswith("  ")]
    if problems:
        raise UsageError(
            f"{path} holds values that no request could use:\n" + "\n".join(problems),
            hint="correct or remove these keys; the engine would keep them",
        )


def token_ids(value: Any) -> list[int] | None:
    """The ids that a config names by one id, a list or null; None when it holds anything else."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return values if all(type(v) is int and 0 <= v < _MAX_COUNT for v in values) else None
