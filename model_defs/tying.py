"""Tied embeddings by the rules transformers applies when it loads a checkpoint.

With `tie_word_embeddings` true and a head in the checkpoint (transformers 5, `tie_weights`):
equal values are tied and stored once; different values mean the config is wrong and nothing is
tied; a head without the embedding serves as both.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from tapeout.model_defs.hf_checkpoint import SafetensorsCheckpoint

logger = logging.getLogger(__name__)


def tied_names(config: Any) -> dict[str, str]:
    """Which parameter takes its values from which, by the model class; {} when not tied."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not getattr(config, "tie_word_embeddings", False) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    names = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._tied_weights_keys
    return dict(names) if isinstance(names, dict) else {}


def resolve_tying(config: Any, checkpoint: SafetensorsCheckpoint) -> tuple[Any, SafetensorsCheckpoint]:
    """Config and checkpoint after tying: a tied head is in neither, a differing one unties the config."""
    checkpoint, differing = tie(checkpoint, tied_names(config))
    for target, source in differing.items():
        logger.warning("%s differs from %s: not tied, although tie_word_embeddings is true", target, source)
        config = copy.deepcopy(config)
        config.tie_word_embeddings = False
    return config, checkpoint


def tie(
    checkpoint: SafetensorsCheckpoint, tied: Mapping[str, str]
) -> tuple[SafetensorsCheckpoint, dict[str, str]]:
    """The checkpoint without the copies that `tied` (copy to original) allows it, and those whose values
    differ from their original's, which stay."""
    files, differing = dict(checkpoint.files), {}
    for target, source in tied.items():
        if target not in files:
            continue
        if source not in files:
            files[source] = files.pop(target).renamed(source)
        elif _equal(checkpoint, target, source):
            del files[target]
        else:
            differing[target] = source
    return SafetensorsCheckpoint(files), differing


def _equal(checkpoint: SafetensorsCheckpoint, one: str, other: str) -> bool:
    """Whether both tensors hold the same values; equal types are compared without loading both."""
    a, b = checkpoint.files[one], checkpoint.files[other]
    if a.info.shape != b.info.shape:
        return False
    if a.info.dtype == b.info.dtype:
        return all(x == y for x, y in zip(a.chunks(), b.chunks(), strict=True))
    return np.array_equal(a.read().astype(np.float32), b.read().astype(np.float32))
