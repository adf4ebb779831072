"""Config values no model can have, and generation defaults no request could use: named with their file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tapeout.model_defs import open_model
from tapeout.model_defs.architecture import check_supported
from tapeout.model_defs.check_checkpoint import check_checkpoint
from tapeout.plugins.errors import UnsupportedError, UsageError

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32, "factor": 16.0,
}  # fmt: skip


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
    @pytest.mark.parametrize(
        ("parameters", "why"),
        [
            (LONGROPE, "rope_parameters: rope_type 'longrope' switches at the length of the sequence"),
            ({"rope_type": "dynamic", "factor": 2.0}, "rope_parameters: rope_type 'dynamic' changes with"),
        ],
    )
    def test_frequencies_that_follow_the_length(self, llama, edit_json, parameters, why):
        edit_json(llama / "config.json", rope_parameters={"rope_theta": 1e4, **parameters})
        with pytest.raises(UnsupportedError, match=why) as caught:
            open_model(str(llama))
        assert "model_type 'llama'" in caught.value.message

    def test_an_unknown_type(self, llama, edit_json):
        edit_json(llama / "config.json", rope_parameters={"rope_theta": 1e4, "rope_type": "foo"})
        with pytest.raises((UsageError, UnsupportedError), match=r"rope_type.*'foo'.*llama3.*yarn"):
            open_model(str(llama))

    def test_in_one_kind_of_layer(self, models):
        plain = {"rope_type": "default", "rope_theta": 1e4}
        config = models.tiny_config("gemma3_text")
        config.rope_parameters = {
            "full_attention": plain | {"rope_type": "dynamic", "factor": 2.0},
            "sliding_attention": plain,
        }
        with pytest.raises(UnsupportedError, match=r"rope_parameters\.full_attention: rope_type 'dynamic'"):
            check_supported(config, "m", trust_remote_code=False)

    def test_part_of_a_head(self, models):
        check_supported(models.tiny_config("phi3", pad_token_id=2), "m", trust_remote_code=False)
        config = models.tiny_config("phi3", pad_token_id=2, partial_rotary_factor=0.5)
        with pytest.raises(UnsupportedError, match=r"partial_rotary_factor 0\.5; only .* whole heads"):
            check_supported(config, "m", trust_remote_code=False)


@pytest.mark.parametrize(
    ("model_type", "overrides", "why"),
    [
        ("llama4_text", {"pad_token_id": 2}, "layers of type chunked_attention"),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2}, "AttentionInterface"),
        ("bloom", {"n_layer": 2}, "AttentionInterface"),
        ("mpt", {"n_layers": 2}, "AttentionInterface"),
        ("gpt_neox", {}, "partial_rotary_factor"),
    ],
)
def test_architectures_are_refused_by_what_they_are(models, model_type, overrides, why):
    config = models.tiny_config(model_type, **overrides)
    with pytest.raises(UnsupportedError) as caught:
        check_supported(config, "m", trust_remote_code=False)
    assert f"model_type '{model_type}'" in caught.value.message
    assert why in caught.value.message
    assert "encoder" not in caught.value.message


def test_falcons_attention_is_its_own():
    from transformers import CONFIG_MAPPING

    with pytest.raises(UnsupportedError, match="AttentionInterface"):
        check_supported(CONFIG_MAPPING["falcon"](), "m", trust_remote_code=False)


def test_a_checkpoint_that_transformers_renames_by_class(models):
    config = models.tiny_config("gpt_neox", architectures=["GPTNeoXForCausalLM"])
    source = SimpleNamespace(config=config, checkpoint=SimpleNamespace(tensors={}))
    with pytest.raises(UnsupportedError, match="rewritten by transformers"):
        check_checkpoint(source, {"lm_head.weight": (4, 4)}, {})
