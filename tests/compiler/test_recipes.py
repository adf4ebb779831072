"""Engine weights are Hugging Face's parameters: made by recipes, compared with HF's own loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tapeout.compiler import parity
from tapeout.model_defs.meta_model import expected_tensors, load_meta_model
from tapeout.model_defs.weights import CONST_PREFIX, WeightRef
from tapeout.plugins.registry import OPS

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {"lengths": (33, 11), "sliding_window": 8},
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_engine_weight_is_what_hf_loads(family: Callable[..., Any], model_type: str) -> None:
    tiny = family(model_type, **CONFIGS[model_type])
    model = tiny.hf("float32")
    held = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    weights = tiny.weights(tiny.graph)
    used: set[str] = set()
    for name, type_ in tiny.module.weights.items():
        sources = list(tiny.graph.weights[name].source_names())
        used |= set(sources)
        parts = [
            buffers[s.removeprefix(CONST_PREFIX)] if s.startswith(CONST_PREFIX) else held[s] for s in sources
        ]
        expected = parts[0] if len(parts) == 1 else torch.cat(parts)  # recipes here only concatenate rows
        assert tuple(weights[name].shape) == type_.shape
        assert torch.equal(weights[name], expected), name
    # Nothing HF holds is left out.
    tied = {n for n in held if any(held[n] is held[u] for u in used - {n} if u in held)}
    assert held.keys() - used - tied == set()


def test_casts_round_as_hf_does(family: Callable[..., Any]) -> None:
    tiny = family("llama", dtype="bfloat16")
    held = dict(tiny.hf("bfloat16").named_parameters())
    weights = tiny.weights(tiny.graph)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        assert torch.equal(weights[name], held[name])
    merged = torch.cat([held[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(weights["model.layers.0.self_attn.qkv_proj.weight"], merged)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_streamed_weights_give_the_same_logits_as_from_pretrained(
    family: Callable[..., Any], model_type: str
) -> None:
    """Parity's reference side loads one module at a time; not a bit may differ from HF's loader."""
    tiny = family(model_type, **CONFIGS[model_type])
    tensors = tiny.source.checkpoint.tensors
    _, tied = expected_tensors(load_meta_model(tiny.source, "float32", "eager"))
    tokens = np.array([tiny.packed.sequences[0][:11]], dtype=np.int32)
    streamed = parity._reference_logits(
        tiny.source, "float32", tokens, 1, lambda n: WeightRef.of(tensors[tied.get(n, n)]), tokens.shape[1]
    )
    with torch.no_grad():
        expected = tiny.hf("float32")(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    assert np.array_equal(streamed, expected)


def test_no_op_is_without_a_schema(family: Callable[..., Any]) -> None:
    """Weights stand in the order of the schema, so that the executor can bind them."""
    for node in family("qwen2", tie_word_embeddings=True).module.nodes:
        assert len(node.weights) <= len(OPS[node.op].weights)
        required = [
            w for w, n in zip(node.weights, OPS[node.op].weights, strict=False) if not n.endswith("?")
        ]
        assert all(required)
