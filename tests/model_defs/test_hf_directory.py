"""Opening Hugging Face directories: what is read, and what is refused with which words."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from tapeout.model_defs import open_model
from tapeout.model_defs.check_checkpoint import check_checkpoint
from tapeout.model_defs.meta_model import expected_tensors, load_meta_model
from tapeout.plugins.errors import UnsupportedError, UsageError

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_equal_what_transformers_loads(models, tmp_path, dtype):
    folder = models.make_tiny("qwen3", tmp_path / "m", dtype=dtype)
    source = open_model(str(folder))
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).state_dict()
    assert source.checkpoint.tensors.keys() == state.keys()
    for name, tensor in state.items():
        value = source.checkpoint.read(name)
        assert value.dtype.name == dtype
        assert np.array_equal(value.astype(np.float32), tensor.float().numpy())
    assert source.origin == "hf"
    assert source.hf_path == str(folder)


def test_tokenizer_template_and_generation_defaults(llama):
    source = open_model(str(llama))
    hf = AutoTokenizer.from_pretrained(llama)
    assert source.tokenizer_vocab_size == len(hf) == 300
    assert source.chat_template == hf.chat_template
    assert source.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    assert source.generation["eos_token_id"] == [1, 4]
    assert "transformers_version" not in source.generation


def test_end_ids_follow_generation_config_then_config_then_tokenizer(llama, edit_json):
    assert open_model(str(llama)).eos_token_ids == (1, 4)
    edit_json(llama / "generation_config.json", eos_token_id=7)
    assert open_model(str(llama)).eos_token_ids == (7,)
    edit_json(llama / "config.json", eos_token_id=[8, 9])
    edit_json(llama / "generation_config.json", eos_token_id=...)
    assert open_model(str(llama)).eos_token_ids == (8, 9)
    (llama / "generation_config.json").unlink()
    source = open_model(str(llama))
    assert source.eos_token_ids == (8, 9)
    assert source.generation == {}
    edit_json(llama / "config.json", eos_token_id=..., bos_token_id=...)
    source = open_model(str(llama))  # LlamaConfig's own defaults are 1 and 2; the tokenizer says 0 and 1
    assert (source.bos_token_id, source.eos_token_ids) == (0, (1,))
    edit_json(llama / "generation_config.json", eos_token_id=["</s>"])
    with pytest.raises(UsageError, match="eos_token_id"):
        open_model(str(llama))


def test_named_chat_templates_give_the_default(llama, edit_json):
    (llama / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    edit_json(llama / "tokenizer_config.json", chat_template=named)
    assert open_model(str(llama)).chat_template == "D"
    edit_json(llama / "tokenizer_config.json", chat_template="plain")
    assert open_model(str(llama)).chat_template == "plain"
    edit_json(llama / "tokenizer_config.json", chat_template=...)
    assert open_model(str(llama)).chat_template is None


def test_a_model_without_tokenizer_files(llama):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (llama / name).unlink()
    source = open_model(str(llama))
    assert source.tokenizer_json is None
    assert source.tokenizer_vocab_size == 0
    assert source.eos_token_ids == (1, 4)


def test_a_damaged_tokenizer_is_an_error(llama):
    (llama / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UsageError, match="tokenizer"):
        open_model(str(llama))


def test_base_model_checkpoints_get_the_prefix(models, tmp_path):
    folder = models.make_tiny("llama", tmp_path / "m", tie_word_embeddings=True)
    want = open_model(str(folder)).checkpoint
    digest = want.digest()
    tensors = {n.removeprefix("model."): t for n, t in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    assert open_model(str(folder)).checkpoint.tensors == want.tensors
    assert open_model(str(folder)).checkpoint.digest() == digest


class TestTying:
    """Each case against what transformers itself computes from the same folder."""

    @pytest.fixture
    def tied(self, models, tmp_path):
        return models.make_tiny("llama", tmp_path / "m", tie_word_embeddings=True)

    def rewrite(self, folder, change):
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    def head_and_embedding(self, folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
        return model.lm_head.weight.detach().numpy(), model.model.embed_tokens.weight.detach().numpy()

    def test_equal_head_is_stored_once(self, tied):
        self.rewrite(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        source = open_model(str(tied))
        assert "lm_head.weight" not in source.checkpoint.tensors
        assert source.config.tie_word_embeddings

    def test_differing_head_unties(self, tied):
        self.rewrite(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
        source = open_model(str(tied))
        head, embedding = self.head_and_embedding(tied)
        assert not source.config.tie_word_embeddings
        assert np.array_equal(source.checkpoint.read("lm_head.weight"), head)
        assert np.array_equal(source.checkpoint.read("model.embed_tokens.weight"), embedding)

    def test_head_alone_is_the_embedding_too(self, tied):
        self.rewrite(tied, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
        source = open_model(str(tied))
        _, embedding = self.head_and_embedding(tied)
        assert "lm_head.weight" not in source.checkpoint.tensors
        assert np.array_equal(source.checkpoint.read("model.embed_tokens.weight"), embedding)


class TestRefused:
    def test_folder_without_config(self, llama):
        (llama / "config.json").unlink()
        with pytest.raises(UsageError, match=r"no config\.json; it holds .*model\.safetensors") as error:
            open_model(str(llama))
        assert error.value.exit_code == 2

    @pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama", "hidden_size": "wide"}'])
    def test_unusable_config(self, llama, content):
        (llama / "config.json").write_text(content)
        with pytest.raises(UsageError, match=r"config\.json"):
            open_model(str(llama))

    def test_unknown_model_type(self, llama, edit_json):
        edit_json(llama / "config.json", model_type="llamma", architectures=["LlammaForCausalLM"])
        with pytest.raises(UnsupportedError, match=r"'llamma' \(architectures: LlammaForCausalLM\)") as error:
            open_model(str(llama))
        assert error.value.exit_code == 5
        assert error.value.hint

    @pytest.mark.parametrize(
        ("model_type", "why"),
        [
            ("t5", "no causal language model"),
            ("bart", "encoder-decoder"),
            ("gemma3", "multimodal"),
            ("bert", "encoder"),
            ("mamba", "linear_attention"),
            ("rwkv", "recurrent state"),
            ("qwen3_next", "linear_attention"),
            ("falcon_h1", "hybrid"),
            ("minimax", "linear_attention"),
            ("lfm2", "conv"),
        ],
    )
    def test_kinds_of_models_that_cannot_be_built(self, tmp_path, model_type, why):
        overrides = {"layer_types": ["conv"] * 16, "num_hidden_layers": 16} if model_type == "lfm2" else {}
        CONFIG_MAPPING[model_type](**overrides).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedError) as error:
            open_model(str(tmp_path))
        assert f"model_type '{model_type}'" in error.value.message
        assert why in error.value.message
        assert error.value.hint

    def test_another_head(self, llama, edit_json):
        edit_json(llama / "config.json", architectures=["LlamaForSequenceClassification"])
        with pytest.raises(UnsupportedError, match="Classification, expected LlamaForCausalLM"):
            open_model(str(llama))

    def test_quantized_weights(self, llama, edit_json):
        edit_json(llama / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
        with pytest.raises(UnsupportedError, match=r"quantized \(gptq\)"):
            open_model(str(llama))

    def test_remote_code_is_off_unless_asked(self, llama, edit_json):
        (llama / "own.py").write_text("raise SystemExit('ran')")
        auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        edit_json(llama / "config.json", model_type="own", auto_map=auto_map)
        with pytest.raises(UsageError, match=r"'own'.*its own Python code") as error:
            open_model(str(llama))
        assert "--trust-remote-code" in error.value.hint

    def test_remote_code_runs_when_asked(self, llama, edit_json):
        (llama / "own.py").write_text(
            "from transformers import LlamaConfig, LlamaForCausalLM\n"
            "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
            "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        )
        auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        edit_json(llama / "config.json", model_type="own", architectures=["OwnModel"], auto_map=auto_map)
        source = open_model(str(llama), trust_remote_code=True)
        assert source.trust_remote_code
        model = load_meta_model(source, "float32", "eager")
        assert type(model).__name__ == "OwnModel"
        check_checkpoint(source, *expected_tensors(model))

    def test_paths_that_do_not_exist(self, tmp_path):
        for model in (str(tmp_path / "nothing"), "missing.gguf", "./a/b", "one/two/three", "a/missing.gguf"):
            with pytest.raises(UsageError, match="no such file or directory"):
                open_model(model)
        stray = tmp_path / "notes.txt"
        stray.write_text("hello")
        with pytest.raises(UsageError, match="not a GGUF file"):
            open_model(str(stray))


def test_config_spellings_of_rope_give_one_config(llama):
    """transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters."""
    path = llama / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters")
    scaling = {"rope_type": "linear", "factor": 4.0}
    path.write_text(json.dumps(config | {"rope_parameters": scaling | {"rope_theta": 1e6}}))
    new = open_model(str(llama)).config
    scaling = {"type": "linear", "factor": 4.0}
    path.write_text(json.dumps(config | {"rope_theta": 1e6, "rope_scaling": scaling}))
    old = open_model(str(llama)).config
    for spelled in (old, new):
        assert spelled.rope_parameters["rope_theta"] == 1e6
        assert spelled.rope_parameters["factor"] == 4.0
        assert spelled.rope_parameters["rope_type"] == "linear"
