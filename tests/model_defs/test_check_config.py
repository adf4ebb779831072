"""Config values no model can have, and generation defaults no request could use: named with their file."""

from __future__ import annotations

import pytest

from tapeout.model_defs import open_model
from tapeout.model_defs.architecture import check_supported
from tapeout.plugins.errors import UnsupportedError, UsageError


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", ["llama"]),
        ("model_type", {"a": 1}),
        ("hidden_size", 0),
        ("num_attention_heads", -4),
        ("vocab_size", 2**40),
        ("num_hidden_layers", 2.5),
        ("max_position_embeddings", "many"),
        ("num_key_value_heads", True),
        ("architectures", "LlamaForCausalLM"),
        ("auto_map", ["own"]),
        ("layer_types", [1]),
    ],
)
def test_a_config_value_that_no_model_has(llama, edit_json, key, value):
    edit_json(llama / "config.json", **{key: value})
    with pytest.raises(UsageError, match=rf"config\.json: {key} is .*expected"):
        open_model(str(llama))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_deep_nesting(llama, name):
    (llama / name).write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(UsageError, match="is not valid JSON"):
        open_model(str(llama))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_k", 2.5),
        ("top_p", 1.5),
        ("eos_token_id", [10**30]),
        ("eos_token_id", [1, -1]),
        ("bos_token_id", "a"),
        ("pad_token_id", True),
    ],
)
def test_a_generation_value_that_no_request_could_use(llama, edit_json, key, value):
    edit_json(llama / "generation_config.json", **{key: value})
    with pytest.raises(UsageError, match=rf"generation_config\.json holds .*\n  {key} = "):
        open_model(str(llama))


def test_usual_generation_values_are_taken(llama, edit_json):
    usual = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "do_sample": True, "eos_token_id": [1, 4]}
    edit_json(llama / "generation_config.json", **usual, max_new_tokens=20, bos_token_id=None)
    assert open_model(str(llama)).generation["top_k"] == 50


def test_a_model_path_that_is_too_long():
    with pytest.raises(UsageError, match=r"cannot be opened: .*too long"):
        open_model("x" * 5000)
    with pytest.raises(UsageError, match="cannot be opened"):
        open_model("~no-such-user-anywhere/model")


class TestRope:
    def test_an_unknown_type(self, llama, edit_json):
        edit_json(llama / "config.json", rope_parameters={"rope_theta": 1e4, "rope_type": "foo"})
        with pytest.raises((UsageError, UnsupportedError), match=r"rope_type.*'foo'.*llama3.*yarn"):
            open_model(str(llama))

    def test_in_one_kind_of_layer(self, models):
        plain = {"rope_type": "default", "rope_theta": 1e4}
        config = models.tiny_config("gemma3_text")
        config.rope_parameters = {
            "full_attention": plain | {"rope_type": "foo", "factor": 2.0},
            "sliding_attention": plain,
        }
        with pytest.raises(UnsupportedError, match=r"rope_parameters\.full_attention: rope_type 'foo'"):
            check_supported(config, "m", trust_remote_code=False)


@pytest.mark.parametrize(
    ("model_type", "overrides", "why"),
    [
        ("llama4_text", {"pad_token_id": 2}, "layers of type chunked_attention"),
    ],
)
def test_architectures_are_refused_by_what_they_are(models, model_type, overrides, why):
    config = models.tiny_config(model_type, **overrides)
    with pytest.raises(UnsupportedError) as caught:
        check_supported(config, "m", trust_remote_code=False)
    assert f"model_type '{model_type}'" in caught.value.message
    assert why in caught.value.message
    assert "encoder" not in caught.value.message


@pytest.mark.parametrize(
    ("setting", "ok"),
    [
        ({"num_beams": 4}, False),
        ({"no_repeat_ngram_size": 3}, False),
        ({"made_up": True}, False),
        ({"num_beams": 1, "no_repeat_ngram_size": 0, "length_penalty": 1.0}, True),
        ({"max_length": 4096, "transformers_version": "4.40.0", "cache_implementation": "hybrid"}, True),
        ({"num_beams": None}, True),
    ],
)
def test_generation_settings_that_no_request_could_follow(llama, edit_json, setting, ok):
    edit_json(llama / "generation_config.json", **setting)
    if ok:
        open_model(str(llama))
        return
    (name,) = setting
    with pytest.raises(UnsupportedError, match=rf"generation_config\.json has settings .*\n  {name} = "):
        open_model(str(llama))
