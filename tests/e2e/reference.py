"""Hugging Face's greedy answers of SmolLM2, and its logits along them.

The model is HF's own, its weights come from the GGUF file through our reader: HF's own GGUF
loading takes a minute (tests/model_defs proves both equal).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tokenizers
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tapeout.model_defs import ModelSource, open_model
from tapeout.model_defs.meta_model import load_meta_model

NEW_TOKENS = 64
PAGE = 32  # of the engine; prompts end on, before and after a border

TEXTS = {
    "english": "The capital of France is",
    "code": "def quicksort(items: list[int]) -> list[int]:\n    if len(items) <= 1:\n",
    "digits": "3.14159265358979323846 and 2.71828182845904523536 and 1.41421356",
    "unicode": "Été à Zürich: 東京は日本の首都です。 😀😃😄😁 👩‍👩‍👧‍👦 🇫🇷 ",
    "french": "Il était une fois, dans une petite maison près de la forêt, une",
    "one token": "The",
}
LONG_TEXT = (
    "A page of the cache holds the keys and values of a few tokens. When a request grows, it takes another "
    "page from the pool; when it ends, its pages go back. Nobody moves them, nobody copies them, and the "
    "table of the request says where each one lies. "
)
MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Why is the sky blue?"},
]


@dataclass
class Reference:
    """HF's side of the comparison.

    Attributes:
        prompts: token ids by name.
        greedy: NEW_TOKENS ids HF generates, by name; it goes on after an end of sequence.
        logits: float32 `[NEW_TOKENS, vocab]` from which those ids are the maxima, by name.
    """

    source: ModelSource
    tokenizer: Any
    prompts: Mapping[str, list[int]]
    greedy: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def new_tokens(self) -> int:
        return NEW_TOKENS

    def gap(self, name: str, position: int) -> float:
        """HF's float32 logit of the best id minus the second best's."""
        best = self.logits[name][position].topk(2).values
        return float(best[0] - best[1])

    def bf16_errors(self, positions: Mapping[str, int]) -> dict[str, float]:
        """For each name, at its position: the largest difference of HF's bfloat16 from its float32 logits."""
        model = hf_model(self.source, "bfloat16")
        errors = {}
        for name, i in positions.items():
            ids = torch.tensor([self.prompts[name] + self.greedy[name][:i]])
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, 0].float()
            errors[name] = float((logits - self.logits[name][i]).abs().max())
        return errors

    def _along(self, model: Any, name: str) -> torch.Tensor:
        """Logits that choose each generated token, from one forward over prompt and answer."""
        ids = torch.tensor([self.prompts[name] + self.greedy[name][:-1]])
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False, logits_to_keep=NEW_TOKENS).logits[0].float()


def hf_model(source: ModelSource, dtype: str) -> Any:
    """HF's model with the source's weights, cast one by one."""
    model = load_meta_model(source, dtype, "sdpa")
    weights = {
        name: torch.from_numpy(np.ascontiguousarray(source.checkpoint.read(name), np.float32)).to(
            getattr(torch, dtype)
        )
        for name in source.checkpoint.tensors
    }
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    assert not any(p.is_meta for p in model.parameters())
    return model


def make_reference(gguf: str) -> Reference:
    """Everything HF has to say, computed once."""
    source = open_model(gguf)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(source.tokenizer_json),
        chat_template=source.chat_template,
        **source.special_tokens,
    )
    prompts = {name: tokenizer.encode(text) for name, text in TEXTS.items()}
    prompts["chat"] = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    prompts["page"] = tokenizer.encode(LONG_TEXT)[:PAGE]
    prompts["long"] = tokenizer.encode(LONG_TEXT * 6)[: 10 * PAGE + 1]
    assert len(prompts["one token"]) == 1
    assert len(prompts["long"]) > 300

    reference = Reference(source, tokenizer, prompts)
    model = hf_model(source, "float32")
    short = [name for name in prompts if name != "long"]
    reference.greedy.update(zip(short, _generate(model, [prompts[n] for n in short]), strict=True))
    reference.greedy["long"] = _generate(model, [prompts["long"]])[0]
    reference.logits.update({name: reference._along(model, name) for name in prompts})
    return reference


def _generate(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """HF `generate`, greedily, prompts padded on the left into one batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, use_cache=True)
    model.generation_config = config  # the model's own would end at its EOS
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return out[:, width:].tolist()
