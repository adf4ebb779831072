"""Facts against the modules and calls of real (tiny) models."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tapeout.model_defs.facts import expected_counts
from tapeout.model_defs.families import families

#: Families whose match counts are known.
FAMILIES = [name for name, family in families().items() if family.facts is not None]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("layers", [2, 3])
def test_counts_equal_the_modules_of_a_model(models, monkeypatch, model_type, layers):
    per_layer = {"layer_types": ["sliding_attention", "full_attention", "full_attention"][:layers]}
    overrides = {"num_hidden_layers": layers} | (per_layer if model_type in ("gemma2", "gemma3_text") else {})
    if model_type == "smollm3":
        overrides["no_rope_layers"] = [1, 0, 1][:layers]
    config = models.tiny_config(model_type, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    modeling = sys.modules[type(model).__module__]
    rotations = []
    rotate = modeling.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling, "apply_rotary_pos_emb", lambda *a, **k: rotations.append(1) or rotate(*a, **k)
    )
    norms, attentions = [], []
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.register_forward_hook(lambda *_: norms.append(1))
        if type(module).__name__.endswith("Attention"):
            module.register_forward_hook(lambda *_: attentions.append(1))
    with torch.no_grad():
        model(torch.arange(5)[None])
    modules = list(model.modules())
    counts = expected_counts(config)
    # What linears read and what reads them is seen in traced graphs: tests/compiler/test_trace.py.
    assert (counts.pop("normed_linear"), counts.pop("added_linear")) != (None, None)
    assert counts == {
        "attention": len(attentions),
        "rms_norm": len(norms),
        "rope": 2 * len(rotations),
        "qkv_merge": sum(
            hasattr(m, "q_proj") and hasattr(m, "k_proj") and hasattr(m, "v_proj") for m in modules
        ),
        "gated_mlp": sum(hasattr(m, "gate_proj") and hasattr(m, "up_proj") for m in modules),
        "whole_rope": len(rotations),
        "final_norm": 1,
    }


@pytest.mark.parametrize(("share", "layers"), [(1.0, 2), (0.75, 0)])
def test_heads_that_are_rotated_in_part_are_no_whole_ones(models, share, layers):
    config = models.tiny_config("phi3", partial_rotary_factor=share)
    assert expected_counts(config)["whole_rope"] == layers
    assert expected_counts(config)["rope"] == 4


def test_unknown_families_say_so(models):
    config = models.tiny_config("starcoder2")
    counts = expected_counts(config)
    assert counts.pop("attention") == 2
    assert set(counts.values()) == {None}
