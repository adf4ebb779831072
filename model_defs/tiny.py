"""Tiny random checkpoints: a family's own config and layout, small sizes, a small tokenizer.

Weights are random but spread widely enough that greedy ids are decided by clear margins; norms differ from
one and biases from zero, so that a dropped tensor changes the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

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

#: Sizes every tiny model shares, as far as its config class has them.
SIZES: Mapping[str, int] = {
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


def tiny_config(model_type: str, **values: Any) -> Any:
    """A transformers config of the shared sizes; `values` are keyword arguments of its class."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", {})}
    fixed = {n for n in SIZES if isinstance(getattr(kind, n, None), property)}
    sizes = {n: v for n, v in SIZES.items() if n in known and n not in fixed}
    return kind(**{**sizes, **values})


def write_tiny(folder: Path, config: Any, *, seed: int = 0, dtype: str = "float32") -> None:
    """Write a checkpoint of random weights with config, generation config and tokenizer; `folder` is made.

    Equal arguments give equal bytes; the global random state is left alone.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for module_name, module in model.named_modules():
                _spread(module_name, module, config)
            for module in model.modules():  # as transformers does to some families' when it loads them
                if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0
        model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[EOS, 4], pad_token_id=PAD)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder)


def _spread(module_name: str, module: nn.Module, config: Any) -> None:
    """Random values for a module's own parameters and persistent buffers."""
    import torch
    from torch import nn

    parameters = dict(module.named_parameters(recurse=False))
    buffers = {
        n: b
        for n, b in module.named_buffers(recurse=False)
        if n not in module._non_persistent_buffers_set and b.is_floating_point()
    }
    for name, parameter in {**parameters, **buffers}.items():
        spread = torch.randn(parameter.shape)
        if name == "weight" and "norm" in f"{module_name}.{type(module).__name__}".lower():
            parameter.add_(0.3 * spread)  # around the family's own neutral value, 1 or 0
        elif name == "sinks":
            parameter.copy_(spread)
        elif parameter.dim() <= 1:
            parameter.copy_(0.1 * spread)
        elif isinstance(module, nn.Embedding):
            parameter.copy_(spread * _embedding_spread(config))
        else:
            parameter.copy_(spread * 2 / _inputs(module, parameter) ** 0.5)


def _inputs(module: nn.Module, parameter: torch.Tensor) -> int:
    """How many products a result of this matrix sums; transposed layouts have their inputs first."""
    transposed = getattr(module, "is_transposed", False) or type(module).__name__ == "Conv1D"
    return int(parameter.shape[-2 if transposed else -1])


def _embedding_spread(config: Any) -> float:
    """Tied embeddings stay small, or the residual stream would make every token predict itself."""
    if not getattr(config, "tie_word_embeddings", False):
        return 1.0
    return 0.05 if "gemma" in config.model_type else 0.3  # Gemma multiplies by sqrt(hidden)


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
