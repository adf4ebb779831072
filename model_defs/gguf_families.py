"""What a GGUF architecture is in HF terms: the family table.

Tensor names come from the gguf package's table and config keys from transformers'
(`GGUF_CONFIG_MAPPING`); this file adds what they do not say: values that llama.cpp's converter changed,
parameters that a file holds in several tensors, and architectures that cannot be built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tapeout.model_defs import gguf_tensors as tensors
from tapeout.model_defs.gguf_file import GgufFile
from tapeout.model_defs.gguf_metadata import AS_HF, ArchMetadata
from tapeout.model_defs.gguf_tensors import Made, Transform
from tapeout.plugins.errors import UnsupportedError


def _nothing(meta: ArchMetadata) -> dict[str, object]:
    return {}


@dataclass(frozen=True)
class GgufFamily:
    """One GGUF architecture.

    Attributes:
        model_type: HF's.
        name_table: value of `gguf.MODEL_ARCH_NAMES` for the tensor name table.
        key_table: key of transformers' `GGUF_CONFIG_MAPPING`.
        transform: undoes what llama.cpp's converter did to a tensor's values.
        made: parameters that are made from tensors of other names or shapes.
        extra_config: config entries the shared table does not give.
        default_rope_theta: llama.cpp's, used when the file does not state one.
        rotary: `full` (all of a head), `partial` (the part the file states) or `none`.
    """

    model_type: str
    name_table: str
    key_table: str
    transform: Transform = tensors.keep
    made: tuple[Made, ...] = ()
    extra_config: Callable[[ArchMetadata], dict[str, object]] = _nothing
    default_rope_theta: float = 10000.0
    rotary: str = "full"


def _llama(meta: ArchMetadata) -> dict[str, object]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in meta.file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in meta.file.tensors,
    }


def _mistral(meta: ArchMetadata) -> dict[str, object]:
    return {"sliding_window": meta.get("attention.sliding_window")}


def _mixtral(meta: ArchMetadata) -> dict[str, object]:
    return {
        "num_local_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.required("expert_used_count"),
    }


def _qwen2_moe(meta: ArchMetadata) -> dict[str, object]:
    return {
        "moe_intermediate_size": meta.required("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.required("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # what llama.cpp computes; no key says so
    }


def _qwen3_moe(meta: ArchMetadata) -> dict[str, object]:
    return {"moe_intermediate_size": meta.required("expert_feed_forward_length"), "norm_topk_prob": True}


def _minimax_m2(meta: ArchMetadata) -> dict[str, object]:
    meta.expect("expert_gating_func", 2, "sigmoid")
    width = meta.required("expert_feed_forward_length")
    meta.expect("feed_forward_length", width, "the experts' width, as no layer is dense")
    return {"intermediate_size": width}


def _gpt_oss(meta: ArchMetadata) -> dict[str, object]:
    width = meta.get("expert_feed_forward_length", meta.get("feed_forward_length"))
    return {"intermediate_size": width, "sliding_window": meta.required("attention.sliding_window")}


def _gemma2(meta: ArchMetadata) -> dict[str, object]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    caps = {name: meta.get(name) for name in names}
    return {k: v for k, v in caps.items() if v is not None} | _gemma_query_scale(meta, layers_of_27b=46)


def _gemma3(meta: ArchMetadata) -> dict[str, object]:
    return _gemma_query_scale(meta, layers_of_27b=62)


def _gemma_query_scale(meta: ArchMetadata, layers_of_27b: int) -> dict[str, object]:
    """The 27B models scale queries by hidden / heads, all others by head_dim; no key says so."""
    if meta.required("block_count") == layers_of_27b:
        return {
            "query_pre_attn_scalar": meta.required("embedding_length")
            // meta.required("attention.head_count")
        }
    return {"query_pre_attn_scalar": meta.get("attention.key_length", 256)}


def _phi3(meta: ArchMetadata) -> dict[str, object]:
    return {"sliding_window": meta.get("attention.sliding_window") or None, "pad_token_id": None}


def _falcon(meta: ArchMetadata) -> dict[str, object]:
    """Tensors and heads show which of three decoders it is; llama.cpp knows parallel ones only."""
    two_norms = "blk.0.attn_norm_2.weight" in meta.file.tensors
    kv_heads = meta.get("attention.head_count_kv", 1)
    new = two_norms or kv_heads > 1
    return {
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (2 if two_norms else 1) if new else None,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": meta.get("feed_forward_length"),
        "bias": "blk.0.attn_qkv.bias" in meta.file.tensors,
        "alibi": False,
        "parallel_attn": True,
    }


def _bloom(meta: ArchMetadata) -> dict[str, object]:
    """HF has a fixed width of the MLP and no limit of positions."""
    meta.expect("feed_forward_length", 4 * meta.required("embedding_length"), "four times the width")
    meta.expect("attention.head_count_kv", meta.required("attention.head_count"), "one for each head")
    meta.ignore("context_length", "ALiBi has no last position")
    return {}


def _gpt2(meta: ArchMetadata) -> dict[str, object]:
    meta.expect("attention.head_count_kv", meta.required("attention.head_count"), "one for each head")
    return {"n_positions": meta.required("context_length"), "n_inner": meta.required("feed_forward_length")}


def _stablelm(meta: ArchMetadata) -> dict[str, object]:
    parallel = "blk.0.ffn_norm.weight" not in meta.file.tensors
    meta.expect("use_parallel_residual", parallel, "whether ffn_norm is missing")
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in meta.file.tensors,
        "use_parallel_residual": parallel,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in meta.file.tensors,
    }


def _starcoder2(meta: ArchMetadata) -> dict[str, object]:
    return {"use_bias": "blk.0.attn_q.bias" in meta.file.tensors}


def _nemotron(meta: ArchMetadata) -> dict[str, object]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in meta.file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in meta.file.tensors,
    }


_UNPERMUTED, _LESS_ONE = tensors.unpermute_rope, tensors.norm_minus_one

FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("llama", "llama", "llama", _UNPERMUTED, extra_config=_llama),
    "mistral": GgufFamily("mistral", "llama", "mistral", _UNPERMUTED, extra_config=_mistral),
    "qwen2": GgufFamily("qwen2", "qwen2", "qwen2"),
    "qwen2moe": GgufFamily(
        "qwen2_moe", "qwen2moe", "qwen2_moe", made=tensors.SHARED_EXPERTS, extra_config=_qwen2_moe
    ),
    "qwen3": GgufFamily("qwen3", "qwen3", "qwen3"),
    "qwen3moe": GgufFamily(
        "qwen3_moe", "qwen3moe", "qwen3_moe", made=tensors.EXPERTS, extra_config=_qwen3_moe
    ),
    "gemma2": GgufFamily("gemma2", "gemma2", "gemma2", _LESS_ONE, extra_config=_gemma2),
    "gemma3": GgufFamily(
        "gemma3_text", "gemma3", "gemma3", _LESS_ONE, extra_config=_gemma3, default_rope_theta=1_000_000.0
    ),
    "phi3": GgufFamily("phi3", "phi3", "phi3", extra_config=_phi3, rotary="partial"),
    "gpt-oss": GgufFamily(
        "gpt_oss", "gpt-oss", "gpt_oss", made=tensors.GPT_OSS_EXPERTS, extra_config=_gpt_oss
    ),
    "minimax-m2": GgufFamily(
        "minimax_m2",
        "minimax-m2",
        "minimax_m2",
        made=tensors.BIASED_EXPERTS,
        extra_config=_minimax_m2,
        rotary="partial",
    ),
    "falcon": GgufFamily("falcon", "falcon", "falcon", tensors.regroup_falcon, extra_config=_falcon),
    "bloom": GgufFamily(
        "bloom", "bloom", "bloom", tensors.interleave_bloom, extra_config=_bloom, rotary="none"
    ),
    "stablelm": GgufFamily(
        "stablelm",
        "stablelm",
        "stablelm",
        made=tensors.HEAD_NORMS,
        extra_config=_stablelm,
        rotary="partial",
    ),
    "gpt2": GgufFamily(
        "gpt2", "gpt2", "gpt2", made=tensors.CONV1D, extra_config=_gpt2, rotary="none"
    ),
    "starcoder2": GgufFamily("starcoder2", "starcoder2", "starcoder2", extra_config=_starcoder2),
    "nemotron": GgufFamily(
        "nemotron", "nemotron", "nemotron", _LESS_ONE, extra_config=_nemotron, rotary="partial"
    ),
}  # fmt: skip

#: Files of architecture `llama` with experts.
MIXTRAL = GgufFamily(
    "mixtral", "llama", "llama", _UNPERMUTED, made=tensors.EXPERTS, extra_config=_mixtral
)  # fmt: skip

#: Architectures that transformers reads from GGUF files and that cannot be built, with the reason.
REFUSED: Mapping[str, str] = {
    "deci": "its layers differ in heads and width",
    "gemma4": "the heads of its layers differ in size, so their caches differ in shape",
    "lfm2": "it keeps a convolution's state; only models whose state is a KV cache are supported",
    "mamba": "it keeps a recurrent state; only models whose state is a KV cache are supported",
    "qwen35": "it keeps a recurrent state in layers of linear attention; all layers need a KV cache",
    "qwen35moe": "it keeps a recurrent state in layers of linear attention; all layers need a KV cache",
    "t5": "it is an encoder-decoder; only decoder-only models are supported",
    "t5encoder": "it is an encoder; only decoder-only models are supported",
    "umt5": "it is an encoder-decoder; only decoder-only models are supported",
}

# GGUF tensors that no HF parameter holds; everything else without a counterpart is an error.
CONFIG_TENSORS = {"rope_freqs.weight": "read into rope_parameters"}


def family_of(file: GgufFile) -> GgufFamily:
    """The family of a file, or UnsupportedError naming why not, or what is supported."""
    if file.architecture in REFUSED:
        raise UnsupportedError(
            f"{file.path} has GGUF architecture {file.architecture!r}, which cannot be built: "
            f"{REFUSED[file.architecture]}"
        )
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise UnsupportedError(
            f"{file.path} has GGUF architecture {file.architecture!r}; "
            f"supported are {', '.join(sorted(FAMILIES))}",
            hint=AS_HF,
        )
    if family.model_type == "llama" and file.metadata.get("llama.expert_count"):
        return MIXTRAL
    return family
