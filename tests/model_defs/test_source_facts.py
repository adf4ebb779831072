"""What a checkpoint says beside its weights: the same in other words is no difference, another model is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapeout.model_defs.source_facts import SourceFacts, differing_config, differing_text, read_facts
from tapeout.plugins.errors import TapeoutError, UsageError

BUILT = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e6,
    "rope_scaling": {"type": "linear", "factor": 4.0}, "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
RESOLVED = BUILT | {
    "head_dim": 16, "num_key_value_heads": 4, "attention_bias": False,
    "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
}  # fmt: skip
DEFAULTS = {"tie_word_embeddings": False, "hidden_size": 4096, "attention_bias": False}


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., list[str]]:
    """The keys that differ when a config.json has these changes; None takes a key away."""

    def facts(folder: str, config: dict[str, Any]) -> SourceFacts:
        (tmp_path / folder).mkdir(exist_ok=True)
        path = tmp_path / folder / "config.json"
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return read_facts(tmp_path / folder)

    ours = facts("a", BUILT)
    built = replace(ours, resolved=facts("b", RESOLVED).config, defaults=facts("c", DEFAULTS).config)

    def compare(**changes: Any) -> list[str]:
        return [line.split(" is ")[0] for line in differing_config(built, facts("d", BUILT | changes))]

    return compare


ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"transformers_version": "5", "_name_or_path": "x", "use_cache": False, "attention_dropout": 0.1},
        {"torch_dtype": "bfloat16", "dtype": "bfloat16", "eos_token_id": 7, "initializer_range": 1},
        {"head_dim": 16, "num_key_value_heads": 4, "attention_bias": False},  # what was derived, written out
        {"tie_word_embeddings": None, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": ROPE},
    ],
)
def test_the_same_config_in_other_words(compare: Callable[..., list[str]], changes: dict[str, Any]) -> None:
    assert compare(**changes) == []


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"model_type": "mistral"}, ["model_type"]),
        ({"hidden_size": 128, "head_dim": 32}, ["head_dim", "hidden_size"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"rope_theta": 1e4}, ["rope_parameters"]),
        ({"rope_scaling": None}, ["rope_parameters"]),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, ["rope_parameters"]),
        (
            {"rope_theta": None, "rope_scaling": None, "rope_parameters": ROPE | {"factor": 2}},
            ["rope_parameters"],
        ),
        ({"sliding_window": 128}, ["sliding_window"]),
    ],
)
def test_another_config(compare: Callable[..., list[str]], changes: dict[str, Any], keys: list[str]) -> None:
    assert compare(**changes) == keys


def test_text_that_is_there_on_one_side_only() -> None:
    one = SourceFacts({}, {}, {}, {"chat template": "sha256:1", "eos_token_id": [2]})
    other = SourceFacts({}, {}, {}, {"generation top_k": 5, "eos_token_id": [2]})
    assert differing_text(one, one) == []
    assert differing_text(one, other) == [
        "chat template: not there, the engine has one",
        "generation top_k is 5, the engine has none",
    ]
    assert "chat template: the engine has none" in differing_text(other, one)


def test_facts_of_a_directory_that_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match="has no config"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is not valid JSON"):
        read_facts(tmp_path)
