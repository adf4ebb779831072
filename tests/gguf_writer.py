"""Writes tiny GGUF files for tests, by what llama.cpp's converter does to each architecture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
from safetensors.numpy import load_file
from transformers import AutoConfig

# Architectures by the norm whose epsilon the converter writes; all others have RMS norms.
LAYER_NORMS = {"falcon", "bloom", "gpt2", "stablelm", "starcoder2", "nemotron"}
NO_BASE = {"falcon", "stablelm"}  # the converter does not state theirs
WHOLE_HEAD = {"llama", "mistral"}  # the converter states rope.dimension_count although it is all of a head


def write_gguf(
    folder: Path,
    path: Path,
    *,
    arch: str,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    pre: str = "gpt-2",
    quantize: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Write a tiny HF folder as GGUF with llama.cpp's conventions.

    Values are float32; with `quantize` matrices are of that type.
    """
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, arch)
    _add_config(writer, config, arch)
    base = f"{arch}.rope.freq_base"
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    if theta and arch not in NO_BASE and base not in (metadata or {}):
        writer.add_rope_freq_base(theta)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (metadata or {}).items():
        writer.add_array(key, value) if isinstance(value, list) else kinds[type(value)](key, value)
    _add_tokenizer(writer, folder, pre)
    for name, values in converted(folder, arch, config).items():
        if name not in drop:
            if quantize is None or values.ndim < 2:
                writer.add_tensor(name, values)
            else:
                blocks = gguf.quants.quantize(values, quantize)
                writer.add_tensor(name, blocks, raw_dtype=quantize)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_config(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    heads = config.num_attention_heads
    writer.add_context_length(getattr(config, "max_position_embeddings", 512))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    widths = ("intermediate_size", "ffn_hidden_size", "n_inner")
    width = next((w for name in widths if (w := getattr(config, name, None))), 4 * config.hidden_size)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    names = ("num_key_value_heads", "num_kv_heads")
    kv_heads = next((n for name in names if (n := getattr(config, name, None))), heads)
    one = arch == "falcon" and config.multi_query and not config.new_decoder_architecture
    writer.add_head_count_kv(1 if one else kv_heads)
    if "head_dim" in config.to_dict():
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch in LAYER_NORMS:
        names = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
        writer.add_layer_norm_eps(next(e for name in names if (e := getattr(config, name, None))))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, add in (
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        if (value := getattr(config, name, None)) is not None:
            add(value)
    rope = getattr(config, "rope_parameters", None) or {}
    if (part := rope.get("partial_rotary_factor")) or arch in WHOLE_HEAD:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        writer.add_rope_dimension_count(int((part or 1) * head_dim))


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda t: vocab[t])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_eot_token_id(4)
    writer.add_add_bos_token(True)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def converted(folder: Path, arch: str, config: Any) -> dict[str, np.ndarray]:
    """HF tensors under GGUF names with the value changes llama.cpp's converter makes."""
    names = {"mistral": "llama"}
    key = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == names.get(arch, arch))
    table = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for hf_name, values in _authors_layout(load_file(folder / "model.safetensors")).items():
        for name, part in _parts(hf_name, values, arch, config):
            short = name.removeprefix("transformer.") if arch == "bloom" else name
            gguf_name = _by_hand(short) or table.get_name(short, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None, name
            found[gguf_name] = np.ascontiguousarray(part)
    return found


def _authors_layout(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts stored one by one are stacked, as the converter does; norms of heads too."""
    found: dict[str, np.ndarray] = {}
    lists: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)(\..*)?", name)
        if match is None:
            found[name] = values
        else:
            whole = (
                f"{match[1]}{match[3]}" if "experts" in name else f"{match[1].removesuffix('.norms')}.weight"
            )
            lists.setdefault(whole, {})[int(match[2])] = values
    return found | {n: np.stack([parts[i] for i in sorted(parts)]) for n, parts in lists.items()}


def _by_hand(name: str) -> str | None:
    """Names the converter does not look up in its table."""
    layer = re.search(r"layers\.(\d+)\.", name)
    if layer is None:
        return None
    ends = {
        "self_attn.sinks": "attn_sinks.weight",
        "e_score_correction_bias": "exp_probs_b.bias",
        "experts.gate_proj_bias": "ffn_gate_exps.bias",
        "experts.up_proj_bias": "ffn_up_exps.bias",
        "experts.down_proj_bias": "ffn_down_exps.bias",
    }
    return next((f"blk.{layer[1]}.{new}" for end, new in ends.items() if name.endswith(end)), None)


def _parts(name: str, values: np.ndarray, arch: str, config: Any) -> list[tuple[str, np.ndarray]]:
    heads = config.num_attention_heads
    if arch in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
        count = heads if "q_proj" in name else config.num_key_value_heads
        values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if arch in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        values = values + 1
    if "query_key_value" in name and arch == "bloom":
        values = values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    if "query_key_value" in name and arch == "falcon":
        kv_heads = 1 if config.multi_query and not config.new_decoder_architecture else config.num_kv_heads
        qkv = values.reshape(kv_heads, heads // kv_heads + 2, -1, *values.shape[1:])
        q, k, v = qkv[:, :-2], qkv[:, -2:-1], qkv[:, -1:]
        values = np.concatenate([x.reshape(-1, *values.shape[1:]) for x in (q, k, v)])
    if arch == "gpt2" and re.search(r"\.(c_attn|c_fc|c_proj)\.weight", name):
        values = values.T
    if "shared_expert_gate" in name:
        values = values.reshape(-1)
    if arch == "gpt-oss" and "experts" in name:
        return _gpt_oss_experts(name, values)
    if "experts" in name and re.search(r"\.w[123]\.weight|_proj\.weight$|down_proj$", name):
        new = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
        for old, proper in new.items():
            name = name.replace(old, proper)
        return [(f"{_stem(name)}.weight", values)]
    return [(name, values)]


def _stem(name: str) -> str:
    """Experts have one name in the table, whatever their module is called in HF."""
    name = name.removesuffix(".weight")
    return re.sub(r"\.(block_sparse_moe|mlp)\.experts\.", ".mlp.experts.", name)


def _gpt_oss_experts(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    if name.endswith("gate_up_proj_bias"):
        start = name.removesuffix("gate_up_proj_bias")
        return [(f"{start}gate_proj_bias", values[:, ::2]), (f"{start}up_proj_bias", values[:, 1::2])]
    if name.endswith("gate_up_proj"):
        start, rows = name.removesuffix("gate_up_proj"), values.swapaxes(1, 2)
        return [(f"{start}gate_proj.weight", rows[:, ::2]), (f"{start}up_proj.weight", rows[:, 1::2])]
    if name.endswith("down_proj"):
        return [(f"{name}.weight", values.swapaxes(1, 2))]
    return [(name, values)]
