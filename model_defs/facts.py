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
    """

    rms_norms: int
    separate_qkv: bool = True
    separate_gate_up: bool = True


FAMILIES: dict[str, FamilyFacts] = {
    "llama": FamilyFacts(2),
    "mistral": FamilyFacts(2),
    "qwen2": FamilyFacts(2),
    "qwen3": FamilyFacts(4),  # q and k are normalized per head
    "gemma": FamilyFacts(2),
    "gemma2": FamilyFacts(4),  # before and after attention and MLP
    "gemma3_text": FamilyFacts(6),  # as gemma2, and q and k
    "smollm3": FamilyFacts(2),
    "phi3": FamilyFacts(2, separate_qkv=False, separate_gate_up=False),
    "olmo2": FamilyFacts(4),  # after attention and MLP, and q and k over all heads
    "granite": FamilyFacts(2),
}


def expected_counts(config: Any) -> dict[str, int | None]:
    """How often each thing occurs in one forward pass of the model `config` describes.

    Keys: `attention` (calls), `rms_norm` (all, with the final one), `rope` (rotated tensors: q and k
    of every layer that has positions), `qkv_merge` (layers whose q, k, v linears can become one),
    `gated_mlp` (layers whose gate and up linears can become one). None means not known.
    """
    layers = config.num_hidden_layers
    facts = FAMILIES.get(config.model_type)
    if facts is None:
        return {"attention": layers, "rms_norm": None, "rope": None, "qkv_merge": None, "gated_mlp": None}
    # SmolLM3 has layers without positions: 1 in no_rope_layers means that rope is used
    with_positions = getattr(config, "no_rope_layers", None) or [1] * layers
    return {
        "attention": layers,
        "rms_norm": layers * facts.rms_norms + 1,
        "rope": 2 * sum(1 for flag in with_positions[:layers] if flag),
        "qkv_merge": layers if facts.separate_qkv else 0,
        "gated_mlp": layers if facts.separate_gate_up else 0,
    }
