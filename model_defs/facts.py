"""How often each fusion must match in a traced model, by the facts of its family (`families/`).

A pass that matches fewer (or more) places than stated fails the build, so a fusion that silently
stops matching is seen. Families without facts give None for what is not known.
"""

from __future__ import annotations

from typing import Any

from tapeout.model_defs.families import families

_OF_KNOWN_FAMILIES = (
    "rms_norm", "rope", "qkv_merge", "gated_mlp", "whole_rope", "final_norm", "normed_linear", "added_linear",
)  # fmt: skip


def expected_counts(config: Any) -> dict[str, int | None]:
    """How often each thing occurs in one forward pass of the model `config` describes.

    Keys: `attention` (calls), `rms_norm` (all, with the final one), `rope` (rotated tensors: q and k
    of every layer that has positions), `qkv_merge` (layers whose q, k, v linears can become one),
    `gated_mlp` (layers whose gate and up linears can become one), `whole_rope` (layers that rotate
    whole heads of q and k), `final_norm` (the norm of the rows with logits), `normed_linear` (linears,
    the LM head among them, that alone read a norm once projections are merged), `added_linear` (linears
    whose result is added to the residual stream). None means not known.
    """
    layers = config.num_hidden_layers
    known = families().get(config.model_type)
    facts = known.facts if known else None
    if facts is None:
        return {"attention": layers, **dict.fromkeys(_OF_KNOWN_FAMILIES)}
    # SmolLM3 has layers without positions: 1 in no_rope_layers means that rope is used
    with_positions = getattr(config, "no_rope_layers", None) or [1] * layers
    rotating = sum(1 for flag in with_positions[:layers] if flag)
    return {
        "attention": layers,
        "rms_norm": layers * facts.rms_norms + 1,
        "rope": 2 * rotating,
        "qkv_merge": layers if facts.separate_qkv else 0,
        "gated_mlp": layers if facts.separate_gate_up else 0,
        "whole_rope": rotating if _rotates_whole_heads(config) else 0,
        "final_norm": 1,
        "normed_linear": layers * facts.normed_linears + 1,
        "added_linear": layers * facts.added_linears,
    }


def _rotates_whole_heads(config: Any) -> bool:
    """Not so where a part of every head passes through, as in Phi-4-mini."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]  # by layer type
    shares = [getattr(config, "partial_rotary_factor", None)]
    shares += [p.get("partial_rotary_factor") for p in nested or [parameters]]
    return all(share in (None, 1) for share in shares)
