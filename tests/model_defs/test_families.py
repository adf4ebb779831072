"""The families' files: complete, readable, and each a config that transformers accepts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tapeout.model_defs import families as module
from tapeout.model_defs.families import RESULTS, families, family
from tapeout.model_defs.tiny import tiny_config, write_tiny
from tapeout.plugins.errors import UsageError


def test_every_family_has_a_tiny_config():
    for known in families().values():
        config = tiny_config(known.model_type, **known.config)
        assert config.model_type == known.model_type
        for key, value in known.config.items():
            if isinstance(value, (bool, int, str)):
                assert getattr(config, key, value) == value, (known.name, key)


def test_prompts_reach_beyond_windows_and_original_contexts():
    for known in families().values():
        longest = max(known.verify.prompt_lengths)
        rope = known.config.get("rope_parameters", {})
        original = rope.get("original_max_position_embeddings", 0)
        assert longest > max(known.config.get("sliding_window", 0), original), known.name


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(UsageError, match="unknown model family 'qwen33'") as caught:
        family("qwen33")
    assert "qwen3" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('title = "A"\nmodeltype = "a"\n', "unknown keys modeltype"),
        ('title = "A"\n[facts]\nrms_norm = 2\n', "unknown keys rms_norm; expected rms_norms"),
        ('title = "A"\n[verify]\nprompts = 2\n', "unknown keys prompts"),
    ],
)
def test_a_misspelled_key_of_a_file(tmp_path, monkeypatch, text, what):
    (tmp_path / "a.toml").write_text(text)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    with pytest.raises(UsageError, match=what):
        module._read(tmp_path / "a.toml")


def test_recorded_results_are_of_these_families():
    data = json.loads(RESULTS.read_text())
    names = [result["family"] for result in data["results"]]
    assert names == list(families())
    assert all(a < b for a, b in pairwise(names))
    assert {r["parity"] for r in data["results"]} <= {"exact", "tolerance", "none"}
    assert all(r["notes"] for r in data["results"] if r["parity"] == "none")


def test_a_seed_decides_the_bytes(tmp_path):
    config = tiny_config("gpt2")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny(tmp_path / name, config, seed=seed)
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b
    assert a != c
