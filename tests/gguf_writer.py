"""Writes tiny GGUF files for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
from safetensors.numpy import load_file


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
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in (metadata or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    _add_tokenizer(writer, folder, pre)
    for name, values in _converted(folder, arch, config).items():
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


def _converted(folder: Path, arch: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """HF tensors under GGUF names with the value changes llama.cpp's converter makes."""
    key = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    table = gguf.get_tensor_name_map(key, config["num_hidden_layers"])
    converted = {}
    for hf_name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor
        if arch == "llama" and ("q_proj" in hf_name or "k_proj" in hf_name):
            heads = config["num_attention_heads" if "q_proj" in hf_name else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if arch in ("gemma2", "gemma3") and hf_name.endswith("norm.weight"):
            values = values + 1
        name = table.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        converted[name] = np.ascontiguousarray(values)
    return converted
