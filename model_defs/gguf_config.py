"""The HF config behind a GGUF file's metadata.

Key names come from transformers' table (`GGUF_CONFIG_MAPPING`); what that table leaves out would become a
default without a word: rope scaling, rotary widths, biases, expert sizes. Here every key of the
architecture is read or refused.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np

from tapeout.model_defs.gguf_families import GgufFamily
from tapeout.model_defs.gguf_file import GgufFile
from tapeout.model_defs.gguf_metadata import AS_HF, ArchMetadata
from tapeout.plugins.errors import UnsupportedError, UsageError

# Keys of transformers' tables that this file and the families read themselves, because the tables give
# them a name that the config class does not have, or a meaning that holds for some files only.
_READ_HERE = {
    "rope.dimension_count", "rope.freq_base", "attention.key_length", "attention.value_length",
    "expert_feed_forward_length", "expert_gating_func", "sliding_window", "vocab_size",
}  # fmt: skip
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")


def config_values(file: GgufFile, family: GgufFamily, kind: type) -> dict[str, Any]:
    """Keyword arguments for `kind`, the HF config class of the family.

    Errors: UsageError listing metadata keys the file lacks; UnsupportedError for rope scaling
    that cannot be expressed and for keys that nothing reads.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    meta = ArchMetadata(file)
    table = {k: n for k, n in GGUF_CONFIG_MAPPING[family.key_table].items() if k not in _READ_HERE}
    values = {name: meta.get(key) for key, name in table.items() if name not in (None, -1)}
    values |= _epsilon(meta, table)
    for key, name in GGUF_CONFIG_MAPPING["tokenizer"].items():
        if f"tokenizer.{key}" in file.metadata:
            values[name] = file.metadata[f"tokenizer.{key}"]
    values["vocab_size"] = _vocab_size(meta)
    _check_complete(meta, table, values)
    values = {name: value for name, value in values.items() if value is not None}
    values |= family.extra_config(meta)
    values |= _layer_types(meta)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    if lists := [n for n, v in values.items() if isinstance(v, list) and n != "layer_types"]:
        raise UnsupportedError(f"{file.path}: layers differ in {', '.join(sorted(lists))}", hint=AS_HF)
    head_dim = _head_dim(meta, family, kind, values)
    if family.rotary == "none":
        meta.check_all_read()
        return values
    rope = _rope_parameters(meta, family, head_dim)
    if family.model_type == "gemma3_text":  # the scaling is of the global layers only
        local = {"rope_type": "default", "rope_theta": meta.get("rope.local.freq_base", 10000.0)}
        values["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": local | {"rope_theta": meta.get("rope.freq_base_swa", local["rope_theta"])},
        }
    else:
        values["rope_parameters"] = rope
    meta.check_all_read()
    return values


def head_counts(file: GgufFile) -> tuple[int, int]:
    """Heads of queries, and of keys and values, of a file whose config was read."""
    meta = ArchMetadata(file)
    heads = int(meta.required("attention.head_count"))
    default = 1 if file.architecture == "falcon" else heads
    return heads, int(meta.get("attention.head_count_kv", default))


def _epsilon(meta: ArchMetadata, table: dict[str, Any]) -> dict[str, Any]:
    """The norm's epsilon: transformers' table may know one of the two keys only."""
    name = next(table[key] for key in _EPSILONS if key in table)
    found = [value for key in _EPSILONS if (value := meta.get(key)) is not None]
    return {name: found[0] if found else None}


def _vocab_size(meta: ArchMetadata) -> int | None:
    """Rows of the embedding; `vocab_size` is left out by some converters, and tokens may be fewer."""
    embedding = meta.file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return int(embedding.shape[0])
    return meta.get("vocab_size") or len(meta.file.metadata.get("tokenizer.ggml.tokens", ())) or None


def _check_complete(meta: ArchMetadata, table: dict[str, Any], values: dict[str, Any]) -> None:
    needed = ["context_length", "block_count", "feed_forward_length", "embedding_length",
              "attention.head_count", "vocab_size"]  # fmt: skip
    missing = [
        f"{meta.arch}.{key} ({name})"
        for key in needed
        if (name := "vocab_size" if key == "vocab_size" else table.get(key)) is not None
        and not values.get(name)
    ]
    name = next(table[key] for key in _EPSILONS if key in table)
    if values.get(name) is None:
        missing.append(f"{meta.arch}.{_EPSILONS[0]} ({name})")
    if missing:
        raise UsageError(f"{meta.file.path} lacks metadata: {', '.join(missing)}")


def _layer_types(meta: ArchMetadata) -> dict[str, Any]:
    """Newer files state which layers slide: every n-th does not, or one flag a layer."""
    pattern = meta.get("attention.sliding_window_pattern")
    if pattern is None:
        return {}
    count = meta.required("block_count")
    slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(count)]
    return {"layer_types": ["sliding_attention" if s else "full_attention" for s in slides]}


def _head_dim(meta: ArchMetadata, family: GgufFamily, kind: type, values: dict[str, Any]) -> int:
    """Size of a head, put into `values` where the config class has it."""
    derived = int(meta.required("embedding_length")) // int(meta.required("attention.head_count"))
    fallback = derived
    if family.rotary == "full":  # older files state a head that is not width / heads in this way
        fallback = meta.get("rope.dimension_count", derived)
    size = int(meta.get("attention.key_length", fallback))
    if meta.get("attention.value_length", size) != size:
        raise UnsupportedError(f"{meta.file.path}: value heads of another size than key heads", hint=AS_HF)
    declared = getattr(kind, "head_dim", None)
    if size != derived and isinstance(declared, property):
        raise UnsupportedError(
            f"{meta.file.path}: heads of {size} dimensions; {family.model_type} has width / heads, {derived}",
            hint=AS_HF,
        )
    # Model code that does not look at it makes other shapes than the file has, and that is an error.
    if size != derived or "head_dim" in inspect.signature(kind.__init__).parameters:  # type: ignore[misc]
        values["head_dim"] = size
    return size


def _rope_parameters(meta: ArchMetadata, family: GgufFamily, head_dim: int) -> dict[str, Any]:
    file = meta.file
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": meta.get("rope.freq_base", family.default_rope_theta),
    }
    rotary = meta.get("rope.dimension_count", head_dim)
    if family.rotary == "partial":
        rope["partial_rotary_factor"] = rotary / head_dim
    elif rotary != head_dim:
        raise UnsupportedError(
            f"{file.path}: {meta.arch}.rope.dimension_count is {rotary}, {family.model_type} rotates "
            f"whole heads of {head_dim}",
            hint=AS_HF,
        )
    if longrope := [name for name in file.tensors if name.startswith("rope_factors_")]:
        raise UnsupportedError(
            f"{file.path}: LongRoPE factors ({', '.join(longrope)}) cannot be taken from a GGUF file",
            hint=AS_HF,
        )
    scaling = meta.get("rope.scaling.type", "none")
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 0.0))
    if scaling == "linear" or (scaling == "none" and factor not in (0.0, 1.0)):
        return rope | {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        return rope | _yarn(meta, family, factor)
    if scaling != "none":
        raise UnsupportedError(
            f"{file.path}: rope scaling {scaling!r}; supported are none, linear, yarn", hint=AS_HF
        )
    meta.ignore("rope.scaling.original_context_length", "there is no scaling")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, rope, head_dim)
    return rope


def _yarn(meta: ArchMetadata, family: GgufFamily, factor: float) -> dict[str, Any]:
    original = meta.get("rope.scaling.original_context_length")
    if original is None:
        raise UnsupportedError(f"{meta.file.path}: YaRN scaling without original_context_length", hint=AS_HF)
    meta.expect("rope.scaling.attn_factor", 1.0, "YaRN's own")
    meta.expect("rope.scaling.yarn_attn_factor", 1.0, "YaRN's own")
    values = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := meta.get(f"rope.scaling.{key}")) is not None:
            values[name] = value
    if family.model_type == "gpt_oss":  # every published one; no key says so
        values["truncate"] = False
    return values


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
