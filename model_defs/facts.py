"""Facts per model family, as data: how often each fusion must match in a traced model.

A pass that matches fewer (or more) places than stated fails the build, so a fusion that silently
stops matching is seen. Families that are not listed give None for what is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FamilyFacts:
    """Per decoder layer, unless the name says otherwise.

    Attributes:
        rms_norms: RMSNorm modules in a layer; one final norm comes on top.
        separate_qkv: q, k and v are three linears of one input.
        separate_gate_up: the MLP is `act(gate(x)) * up(x)` with two linears of one input.
        normed_linears: linears (or groups that become one) that alone read a norm.
        added_linears: linears whose result is added to the residual stream as it is.
    """

    rms_norms: int
    separate_qkv: bool = True
    separate_gate_up: bool = True
    normed_linears: int = 2
    added_linears: int = 2


FAMILIES: dict[str, FamilyFacts] = {
    "llama": FamilyFacts(2),
    "mistral": FamilyFacts(2),
    "qwen2": FamilyFacts(2),
    "qwen3": FamilyFacts(4),  # q and k are normalized per head
    "gemma": FamilyFacts(2),
    "gemma2": FamilyFacts(4, added_linears=0),  # norms before and after attention and MLP
    "gemma3_text": FamilyFacts(6, added_linears=0),  # as gemma2, and q and k
    "smollm3": FamilyFacts(2),
    "phi3": FamilyFacts(2, separate_qkv=False, separate_gate_up=False),
    # norms after attention and MLP, and of q and k over all heads
    "olmo2": FamilyFacts(4, normed_linears=0, added_linears=0),
    "granite": FamilyFacts(2, added_linears=0),  # results are scaled before they are added
}


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
    facts = FAMILIES.get(config.model_type)
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
