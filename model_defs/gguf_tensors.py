"""Tensor values of GGUF files in HF's order. Needs numpy alone.

llama.cpp's converter permutes, reorders, offsets and splits tensors for its own kernels. `Transform`s undo
what keeps a tensor's name and shape, `Made` rules the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tapeout.model_defs.weights import WeightRef


@dataclass(frozen=True)
class HeadCounts:
    """Heads of queries, and of keys and values."""

    num_attention_heads: int
    num_key_value_heads: int


Transform = Callable[[np.ndarray, str, HeadCounts], np.ndarray]


@dataclass(frozen=True)
class Made:
    """A parameter that is made from GGUF tensors.

    Attributes:
        parameter: pattern of HF's name; its groups are numbers, the layer's first.
        sources: GGUF names; `{0}` stands for the layer.
        build: the recipe, from the sources and the groups' numbers.
    """

    parameter: str
    sources: tuple[str, ...]
    build: Callable[[Sequence[WeightRef], Sequence[int]], WeightRef]

    def match(self, hf_name: str) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
        """GGUF names and numbers for a parameter that this rule is about."""
        found = re.fullmatch(self.parameter, hf_name)
        if found is None:
            return None
        numbers = tuple(map(int, found.groups()))
        return tuple(source.format(*numbers) for source in self.sources), numbers


def keep(weights: np.ndarray, gguf_name: str, heads: HeadCounts) -> np.ndarray:
    return weights


def unpermute_rope(weights: np.ndarray, gguf_name: str, heads: HeadCounts) -> np.ndarray:
    """q and k rows from llama.cpp's interleaved rotary pairs back to HF's two halves."""
    if ".attn_q." in gguf_name:
        count = heads.num_attention_heads
    elif ".attn_k." in gguf_name:
        count = heads.num_key_value_heads
    else:
        return weights
    half = weights.shape[0] // count // 2
    pairs = weights.reshape(count, half, 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)


def norm_minus_one(weights: np.ndarray, gguf_name: str, heads: HeadCounts) -> np.ndarray:
    """Norms of Gemma and Nemotron are stored as `1 + w`; HF's code adds the one itself."""
    return weights - np.float32(1) if gguf_name.endswith("norm.weight") else weights


def regroup_falcon(weights: np.ndarray, gguf_name: str, heads: HeadCounts) -> np.ndarray:
    """All q, all k, all v, back to one group of (its q, k, v) for each kv head."""
    if ".attn_qkv." not in gguf_name:
        return weights
    groups, rest = heads.num_key_value_heads, weights.shape[1:]
    per_group = heads.num_attention_heads // groups
    size = weights.shape[0] // (groups * (per_group + 2))
    q, k, v = np.split(weights, [groups * per_group * size, groups * (per_group + 1) * size])
    parts = [part.reshape(groups, -1, size, *rest) for part in (q, k, v)]
    return np.concatenate(parts, axis=1).reshape(weights.shape)


def interleave_bloom(weights: np.ndarray, gguf_name: str, heads: HeadCounts) -> np.ndarray:
    """All q, all k, all v, back to (q, k, v) of each head."""
    if ".attn_qkv." not in gguf_name:
        return weights
    by_kind = weights.reshape(3, heads.num_attention_heads, -1, *weights.shape[1:])
    return np.ascontiguousarray(by_kind.swapaxes(0, 1)).reshape(weights.shape)


def _as_is(refs: Sequence[WeightRef], numbers: Sequence[int]) -> WeightRef:
    return refs[0]


def _rows_joined(refs: Sequence[WeightRef], numbers: Sequence[int]) -> WeightRef:
    return WeightRef.concat(refs, 1)


def _one_row(refs: Sequence[WeightRef], numbers: Sequence[int]) -> WeightRef:
    """[H] or [1, H] as [1, H]."""
    return refs[0] if len(refs[0].shape) == 2 else refs[0].reshape((1, *refs[0].shape))


def _transposed(refs: Sequence[WeightRef], numbers: Sequence[int]) -> WeightRef:
    return refs[0].transpose()


def _alternating(refs: Sequence[WeightRef], numbers: Sequence[int]) -> WeightRef:
    """Gate and up row by row: [E, I, ...] twice to [E, 2 I, ...]."""
    experts, rows, *rest = refs[0].shape
    return WeightRef.stack(refs, 2).reshape((experts, 2 * rows, *rest))


def _alternating_transposed(refs: Sequence[WeightRef], numbers: Sequence[int]) -> WeightRef:
    return _alternating(refs, numbers).transpose()


def _one_head(refs: Sequence[WeightRef], numbers: Sequence[int]) -> WeightRef:
    _, head = numbers
    return refs[0].slice(0, head, head + 1).reshape((refs[0].shape[1],))


_LAYER = r"model\.layers\.(\d+)\."
_GATE_UP = ("blk.{0}.ffn_gate_exps", "blk.{0}.ffn_up_exps")
_GATE_UP_WEIGHTS = tuple(f"{name}.weight" for name in _GATE_UP)
_GATE_UP_BIASES = tuple(f"{name}.bias" for name in _GATE_UP)
_DOWN = "blk.{0}.ffn_down_exps.weight"

#: Experts of a layer: gate and up stand apart in the file, joined in HF.
EXPERTS = (
    Made(_LAYER + r"mlp\.experts\.gate_up_proj", _GATE_UP_WEIGHTS, _rows_joined),
    Made(_LAYER + r"mlp\.experts\.down_proj", (_DOWN,), _as_is),
)
SHARED_EXPERTS = (
    *EXPERTS,
    Made(_LAYER + r"mlp\.shared_expert_gate\.weight", ("blk.{0}.ffn_gate_inp_shexp.weight",), _one_row),
)
BIASED_EXPERTS = (
    *EXPERTS,
    Made(_LAYER + r"mlp\.e_score_correction_bias", ("blk.{0}.exp_probs_b.bias",), _as_is),
)
#: GPT-OSS' inputs come first, and rows of gate and up alternate.
GPT_OSS_EXPERTS = (
    Made(_LAYER + r"mlp\.experts\.gate_up_proj", _GATE_UP_WEIGHTS, _alternating_transposed),
    Made(_LAYER + r"mlp\.experts\.gate_up_proj_bias", _GATE_UP_BIASES, _alternating),
    Made(_LAYER + r"mlp\.experts\.down_proj", (_DOWN,), _transposed),
    Made(_LAYER + r"mlp\.experts\.down_proj_bias", ("blk.{0}.ffn_down_exps.bias",), _as_is),
    Made(_LAYER + r"self_attn\.sinks", ("blk.{0}.attn_sinks.weight",), _as_is),
)
#: StableLM 2 has a norm of its own for each head; the file holds those of a layer as one matrix.
HEAD_NORMS = tuple(
    Made(
        _LAYER + rf"self_attn\.{side}_layernorm\.norms\.(\d+)\.weight",
        (f"blk.{{0}}.attn_{side}_norm.weight",),
        _one_head,
    )
    for side in "qk"
)
#: GPT-2's linear layers have their inputs first in HF, last in the file.
CONV1D = tuple(
    Made(rf"transformer\.h\.(\d+)\.{hf}\.weight", (f"blk.{{0}}.{gguf}.weight",), _transposed)
    for hf, gguf in (
        (r"attn\.c_attn", "attn_qkv"),
        (r"attn\.c_proj", "attn_output"),
        (r"mlp\.c_fc", "ffn_up"),
        (r"mlp\.c_proj", "ffn_down"),
    )
)
