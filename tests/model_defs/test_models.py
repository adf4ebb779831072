"""The maker of tiny checkpoints, which all other tests build on."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tapeout.model_defs.families import families

#: Families whose match counts are known.
FAMILIES = [name for name, family in families().items() if family.facts is not None]


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_equal_arguments_give_equal_bytes_and_others_do_not(models, tmp_path):
    first = files_of(models.make_tiny("llama", tmp_path / "a"))
    models._cached.cache_clear()
    assert files_of(models.make_tiny("llama", tmp_path / "b")) == first
    assert files_of(models.make_tiny("llama", tmp_path / "c", seed=1)) != first


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_ids_depend_on_the_prompt(models, tmp_path, model_type):
    """A model that answers anything the same way would let faults pass."""
    folder = models.make_tiny(model_type, tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.randint(5, 300, (4, 40), generator=torch.Generator().manual_seed(0))).logits
    assert torch.isfinite(logits).all()
    assert len(logits.argmax(-1).unique()) > 60


def test_the_tokenizer_round_trips_and_has_a_template(models, llama):
    tokenizer = AutoTokenizer.from_pretrained(llama)
    assert tokenizer("héllo 🙂 12").input_ids[0] == models.BOS
    assert tokenizer.decode(tokenizer("héllo 🙂 12").input_ids, skip_special_tokens=True) == "héllo 🙂 12"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
