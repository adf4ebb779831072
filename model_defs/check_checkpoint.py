"""The checkpoint's tensors against the model's parameters: all differences in one error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tapeout.plugins.errors import UnsupportedError, UsageError

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
    source: ModelSource, expected: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
) -> None:
    """UsageError listing every missing, extra and mis-shaped tensor; nothing when all fit.

    UnsupportedError instead when transformers would convert this family's checkpoints itself.

    Args:
        expected: shape of every persistent parameter and buffer of the model by HF name.
        tied: parameters that share another's values (`lm_head.weight` to
            `model.embed_tokens.weight`); they may be absent, and are ignored when present.
    """
    present = source.checkpoint.tensors
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
    if _converted_by_hf(source):
        raise UnsupportedError(
            f"checkpoints of {source.config.model_type} are rewritten by transformers while it loads them "
            f"(tensors are merged or renamed), which is not supported; {len(lines)} tensors differ, "
            f"the first:\n"
            f"{lines[0]}",
            hint="save the model once with transformers 5 in its own layout: save_pretrained(DIR, "
            "save_original_format=False)",
        )
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


def _converted_by_hf(source: ModelSource) -> bool:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    names = [source.config.model_type, *(getattr(source.config, "architectures", None) or [])]
    return any(get_checkpoint_conversion_mapping(name) for name in names)


def _ignored_by_hf(source: ModelSource) -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(source.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return []
    return list(MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)]._keys_to_ignore_on_load_unexpected or [])
