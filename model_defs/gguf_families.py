"""What a GGUF architecture means in HF terms: config keys, tensor values, tensors without a home.

Config key names come from transformers' own table (`GGUF_CONFIG_MAPPING`); this file adds what that
table leaves out and would otherwise silently become a default: rope scaling, biases, head sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tapeout.model_defs.gguf_file import GgufFile
from tapeout.plugins.errors import UnsupportedError, UsageError


class HeadCounts(Protocol):
    """What transforms need of a config: any HF config has it."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...


Transform = Callable[[np.ndarray, str, HeadCounts], np.ndarray]

AS_HF = "use the model's Hugging Face checkpoint (config.json and safetensors) instead"


@dataclass(frozen=True)
class GgufFamily:
    """One GGUF architecture.

    Attributes:
        model_type: HF's.
        gguf_name: key of `gguf.MODEL_ARCH_NAMES` for the tensor name table.
        transform: undoes what llama.cpp's converter did to a tensor's values.
        extra_config: config entries the shared mapping does not give.
        default_rope_theta: llama.cpp's, used when the file does not state one.
    """

    model_type: str
    gguf_name: str
    transform: Transform
    extra_config: Callable[[GgufFile], dict[str, Any]] = lambda file: {}
    default_rope_theta: float = 10000.0


def _keep(weights: np.ndarray, gguf_name: str, heads: HeadCounts) -> np.ndarray:
    return weights


def _unpermute_rope(weights: np.ndarray, gguf_name: str, heads: HeadCounts) -> np.ndarray:
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


def _norm_minus_one(weights: np.ndarray, gguf_name: str, heads: HeadCounts) -> np.ndarray:
    """Gemma norms are stored as `1 + w`; HF's code adds the one itself."""
    return weights - np.float32(1) if gguf_name.endswith("norm.weight") else weights


def _llama_extra(file: GgufFile) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _gemma2_extra(file: GgufFile) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for key, name in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        if (value := file.metadata.get(f"gemma2.{key}")) is not None:
            extra[name] = value
    return extra | _gemma_query_scale(file, layers_of_27b=46)


def _gemma3_extra(file: GgufFile) -> dict[str, Any]:
    return _gemma_query_scale(file, layers_of_27b=62)


def _gemma_query_scale(file: GgufFile, layers_of_27b: int) -> dict[str, Any]:
    """The 27B models scale queries by hidden / heads, all others by head_dim; no key says so."""
    arch = file.architecture
    if file.metadata[f"{arch}.block_count"] == layers_of_27b:
        width = file.metadata[f"{arch}.embedding_length"]
        return {"query_pre_attn_scalar": width // file.metadata[f"{arch}.attention.head_count"]}
    return {"query_pre_attn_scalar": file.metadata.get(f"{arch}.attention.key_length", 256)}


def _phi3_extra(file: GgufFile) -> dict[str, Any]:
    window = file.metadata.get("phi3.attention.sliding_window")
    return {"sliding_window": window or None, "pad_token_id": None}


FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("llama", "llama", _unpermute_rope, _llama_extra),
    "mistral": GgufFamily("mistral", "llama", _unpermute_rope),
    "qwen2": GgufFamily("qwen2", "qwen2", _keep),
    "qwen3": GgufFamily("qwen3", "qwen3", _keep),
    "gemma2": GgufFamily("gemma2", "gemma2", _norm_minus_one, _gemma2_extra),
    "gemma3": GgufFamily("gemma3_text", "gemma3", _norm_minus_one, _gemma3_extra, 1_000_000.0),
    "phi3": GgufFamily("phi3", "phi3", _keep, _phi3_extra),
}

# GGUF tensors that no HF parameter holds; everything else without a counterpart is an error.
CONFIG_TENSORS = {"rope_freqs.weight": "read into rope_parameters"}


def family_of(file: GgufFile) -> GgufFamily:
    """The family of a file, or UnsupportedError naming what is supported."""
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise UnsupportedError(
            f"{file.path} has GGUF architecture {file.architecture!r}; "
            f"supported are {', '.join(sorted(FAMILIES))}",
            hint=AS_HF,
        )
    return family


def config_values(file: GgufFile, family: GgufFamily) -> dict[str, Any]:
    """Keyword arguments for the HF config class.

    Errors: UsageError listing metadata keys the file lacks; UnsupportedError for rope scaling
    that cannot be expressed.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    arch = file.architecture
    values: dict[str, Any] = {}
    for key, name in GGUF_CONFIG_MAPPING[arch].items():
        if name not in (None, -1, "rope_theta") and f"{arch}.{key}" in file.metadata:
            values[name] = file.metadata[f"{arch}.{key}"]
    for key, name in GGUF_CONFIG_MAPPING["tokenizer"].items():
        if f"tokenizer.{key}" in file.metadata:
            values[name] = file.metadata[f"tokenizer.{key}"]
    if (head_dim := file.metadata.get(f"{arch}.attention.key_length")) is not None:
        values["head_dim"] = head_dim
        if file.metadata.get(f"{arch}.attention.value_length", head_dim) != head_dim:
            raise UnsupportedError(f"{file.path}: value heads of another size than key heads", hint=AS_HF)
    values.setdefault("vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ())))
    values |= family.extra_config(file)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    needed = ("max_position_embeddings", "num_hidden_layers", "intermediate_size", "hidden_size",
              "num_attention_heads", "rms_norm_eps", "vocab_size")  # fmt: skip
    if missing := [name for name in needed if not values.get(name)]:
        keys = {name: key for key, name in GGUF_CONFIG_MAPPING[arch].items()}
        raise UsageError(
            f"{file.path} lacks metadata: {', '.join(f'{arch}.{keys[name]} ({name})' for name in missing)}"
        )
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if any(
        isinstance(values[n], list)
        for n in ("num_key_value_heads", "num_attention_heads", "intermediate_size")
    ):
        raise UnsupportedError(f"{file.path}: layers differ in head count or width", hint=AS_HF)
    rope = _rope_parameters(file, family, head_dim)
    if family.model_type == "gemma3_text":  # the scaling is of the global layers only
        local = {
            "rope_type": "default",
            "rope_theta": file.metadata.get("gemma3.rope.local.freq_base", 10000.0),
        }
        values["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    else:
        values["rope_parameters"] = rope
    return values


def _rope_parameters(file: GgufFile, family: GgufFamily, head_dim: int) -> dict[str, Any]:
    arch, meta = file.architecture, file.metadata
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": meta.get(f"{arch}.rope.freq_base", family.default_rope_theta),
    }
    if longrope := [name for name in file.tensors if name.startswith("rope_factors_")]:
        raise UnsupportedError(
            f"{file.path}: LongRoPE factors ({', '.join(longrope)}) cannot be taken from a GGUF file",
            hint=AS_HF,
        )
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    factor = meta.get(f"{arch}.rope.scaling.factor", meta.get(f"{arch}.rope.scale_linear", 0.0))
    if kind == "linear" or (kind == "none" and factor not in (0.0, 1.0)):
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = meta.get(f"{arch}.rope.scaling.original_context_length")
        if original is None:
            raise UnsupportedError(f"{file.path}: YaRN scaling without original_context_length", hint=AS_HF)
        return rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind != "none":
        raise UnsupportedError(
            f"{file.path}: rope scaling {kind!r}; supported are none, linear, yarn", hint=AS_HF
        )
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, rope, head_dim)
    return rope


def _llama3_scaling(file: GgufFile, rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """The `llama3` parameters behind the per-frequency divisors llama.cpp stores.

    The file has only the result. All published models use low 1, high 4, original 8192, so these
    are put in and must reproduce the stored divisors; otherwise the file is refused.
    """
    stored = file.dequantize("rope_freqs.weight").reshape(-1)
    low, high, original, factor = 1.0, 4.0, 8192, float(stored.max())
    wavelength = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelength - low) / (high - low)
    with np.errstate(divide="ignore"):
        middle = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(
        wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, middle)
    )
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise UnsupportedError(
            f"{file.path}: rope_freqs.weight is not llama3 rope scaling "
            "with low 1, high 4, original length 8192",
            hint=AS_HF,
        )
    return rope | {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
