"""The checkpoint's tensors against the model's parameters: all differences in one error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tapeout.model_defs.architecture import causal_lm_class
from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import UsageError

if TYPE_CHECKING:
    from tapeout.model_defs.source import ModelSource

# Tensors that checkpoints hold and no model needs, with the reason.
KNOWN_UNUSED: dict[str, str] = {
    r"\.rotary_emb\.inv_freq$": "inverse frequencies, once saved; computed from the config",
    r"\.attn\.(masked_)?bias$": "GPT-2's causal mask, once saved as a buffer",
    r"\.attention\.(masked_)?bias$": "GPT-NeoX's causal mask, once saved as a buffer",
}
MAX_LISTED = 200


def check_checkpoint(
    source: ModelSource,
    expected: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    converted: Mapping[str, WeightRef] | None = None,
) -> None:
    """UsageError listing every missing, extra and mis-shaped tensor; nothing when all fit.

    Args:
        expected: shape of every persistent parameter and buffer of the model by HF name.
        tied: parameters that share another's values (`lm_head.weight` to
            `model.embed_tokens.weight`); they may be absent, and are ignored when present.
        converted: parameters that are made from tensors of other names (see `conversion.py`).
    """
    converted = converted or {}
    used = {name for ref in converted.values() for name in ref.source_names()}
    made = {name: TensorInfo(name, ref.dtype, ref.shape) for name, ref in converted.items()}
    present = {n: t for n, t in source.checkpoint.tensors.items() if n not in used} | made
    unused = known_unused(source, present)
    lines: list[str] = []
    for name in sorted(expected.keys() - present.keys() - tied.keys()):
        lines.append(f"  missing: {name} {list(expected[name])}")
    for name in sorted(present.keys() - expected.keys() - tied.keys() - unused.keys()):
        lines.append(f"  extra: {name} {list(present[name].shape)} (the model has no such tensor)")
    for name in sorted(expected.keys() & present.keys()):
        if tuple(expected[name]) != present[name].shape:
            lines.append(
                f"  wrong shape: {name} is {list(present[name].shape)}, expected {list(expected[name])}"
            )
    if not lines:
        return
    more = [f"  and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    raise UsageError(
        f"the checkpoint does not fit its config ({source.config.model_type}): {len(lines)} tensors differ:\n"
        + "\n".join(lines[:MAX_LISTED] + more),
        hint="config and weights must come from the same model; check num_hidden_layers, "
        "tie_word_embeddings, attention_bias and the like",
    )


def known_unused(source: ModelSource, names: Mapping[str, object]) -> dict[str, str]:
    """Which of `names` are left out on purpose, with the reason."""
    patterns = dict(KNOWN_UNUSED)
    for pattern in _ignored_by_hf(source):
        patterns[pattern] = "transformers' model class does not load it"
    return {
        name: reason for name in names for pattern, reason in patterns.items() if re.search(pattern, name)
    }


def is_known_unused(name: str) -> bool:
    """Whether no model of any family needs a tensor of this name."""
    return any(re.search(pattern, name) for pattern in KNOWN_UNUSED)


def _ignored_by_hf(source: ModelSource) -> list[str]:
    model_class = causal_lm_class(source.config)
    return [] if model_class is None else list(model_class._keys_to_ignore_on_load_unexpected or [])
