"""The meta model: real buffers with HF's own values, no memory, and the checkpoint checked against it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tapeout.compiler.peak_memory import peak_memory_bytes
from tapeout.model_defs import open_model
from tapeout.model_defs.architecture import calls_interface, written_attention
from tapeout.model_defs.check_checkpoint import check_checkpoint
from tapeout.model_defs.conversion import converted
from tapeout.model_defs.meta_model import expected_tensors, load_meta_model
from tapeout.model_defs.tiny import tiny_config
from tapeout.model_defs.weights import run_recipe
from tapeout.plugins.errors import UnsupportedError, UsageError

WEIGHTS = "model.safetensors"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("phi3", {}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("smollm3", {}),
        ("granite", {}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_equal_a_normally_built_model(models, tmp_path, model_type, overrides, dtype):
    source = open_model(str(models.make_tiny(model_type, tmp_path / "m", **overrides)))
    model = load_meta_model(source, dtype, "eager")
    reference = AutoModelForCausalLM.from_config(
        copy.deepcopy(source.config), dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    assert not model.training
    assert all(p.device.type == "meta" and p.dtype == getattr(torch, dtype) for p in model.parameters())
    got, want = dict(model.named_buffers()), dict(reference.named_buffers())
    assert got.keys() == want.keys()
    assert got  # every family here has inverse frequencies
    for name, buffer in got.items():
        assert buffer.device.type == "cpu"
        assert buffer.dtype == want[name].dtype
        assert torch.equal(buffer, want[name]), name


def test_the_source_config_is_not_changed(llama):
    source = open_model(str(llama))
    before = copy.deepcopy(source.config.to_dict())
    model = load_meta_model(source, torch.bfloat16, "sdpa")
    assert model.config._attn_implementation == "sdpa"
    assert source.config.to_dict() == before
    assert source.config._attn_implementation != "sdpa"


def test_unknown_dtype(llama):
    with pytest.raises(UsageError, match="'float7'"):
        load_meta_model(open_model(str(llama)), "float7", "eager")


def test_a_buffer_nobody_fills_is_an_error(llama, monkeypatch):
    source = open_model(str(llama))
    model_class = type(load_meta_model(source, "float32", "eager"))
    monkeypatch.setattr(model_class, "_init_weights", lambda self, module: None)
    with pytest.raises(UnsupportedError, match=r"model\.rotary_emb\.inv_freq"):
        load_meta_model(source, "float32", "eager")


def test_an_8b_model_takes_no_memory_to_speak_of(llama, edit_json):
    edit_json(
        llama / "config.json",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    source = SimpleNamespace(config=AutoConfig.from_pretrained(llama), trust_remote_code=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: earlier tests held more
    before = peak_memory_bytes()
    model = load_meta_model(source, "bfloat16", "eager")
    grown_bytes = peak_memory_bytes() - before
    assert sum(p.numel() for p in model.parameters()) > 8_000_000_000
    assert sum(b.nbytes for b in model.buffers()) < 1e6
    assert grown_bytes < 200e6


class TestCheck:
    """`check_checkpoint` with what the meta model expects."""

    def check(self, folder):
        source = open_model(str(folder))
        check_checkpoint(source, *expected_tensors(load_meta_model(source, "float32", "eager")))

    def rewrite(self, folder, change):
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    @pytest.mark.parametrize(
        "model_type", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3"]
    )
    def test_complete_checkpoints_pass(self, models, tmp_path, model_type):
        self.check(models.make_tiny(model_type, tmp_path / "m"))

    def test_smollm2_passes(self, smollm2):
        check_checkpoint(smollm2, *expected_tensors(load_meta_model(smollm2, "float32", "eager")))

    def test_all_offenders_at_once(self, llama):
        def change(tensors):
            del tensors["model.layers.0.mlp.up_proj.weight"]
            del tensors["model.layers.1.input_layernorm.weight"]
            tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
            tensors["model.norm.weight"] = torch.zeros(65)

        self.rewrite(llama, change)
        with pytest.raises(UsageError) as error:
            self.check(llama)
        assert "4 tensors differ" in error.value.message
        assert "missing: model.layers.0.mlp.up_proj.weight [96, 64]" in error.value.message
        assert "missing: model.layers.1.input_layernorm.weight [64]" in error.value.message
        assert "extra: model.layers.0.self_attn.q_proj.bias [64]" in error.value.message
        assert "wrong shape: model.norm.weight is [65], expected [64]" in error.value.message
        assert error.value.exit_code == 2

    @pytest.mark.parametrize(
        ("model_type", "config"),
        [
            ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32}),
            ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
        ],
    )
    def test_recipes_of_merged_tensors_equal_transformers_loader(self, models, tmp_path, model_type, config):
        folder = models.make_tiny(model_type, tmp_path / "m", **config)
        assert any(".experts.0." in name for name in load_file(folder / WEIGHTS))  # as models are published
        source = open_model(str(folder))
        model = load_meta_model(source, "float32", "eager")
        recipes = converted(model, source.checkpoint.tensors, expected_tensors(model)[0])
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert len(recipes) >= 4
        for name, recipe in recipes.items():
            made = run_recipe(recipe, source.checkpoint.read)
            assert np.array_equal(made, loaded[name].numpy()), name
        check_checkpoint(source, *expected_tensors(model), recipes)

    def test_missing_head_is_not_tied_silently(self, llama):
        self.rewrite(llama, lambda t: t.pop("lm_head.weight"))
        with pytest.raises(UsageError, match=r"missing: lm_head\.weight"):
            self.check(llama)

    def test_more_layers_in_the_config_than_in_the_checkpoint(self, llama, edit_json):
        edit_json(llama / "config.json", num_hidden_layers=3)
        with pytest.raises(UsageError, match=r"missing: model\.layers\.2\."):
            self.check(llama)

    def test_fewer_layers_in_the_config(self, llama, edit_json):
        edit_json(llama / "config.json", num_hidden_layers=1)
        with pytest.raises(UsageError, match=r"extra: model\.layers\.1\."):
            self.check(llama)

    def test_known_leftovers_are_ignored(self, llama):
        leftovers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
        self.rewrite(llama, lambda t: t.update(leftovers))
        self.check(llama)

    def test_a_tied_head_may_be_present(self, llama):
        source = open_model(str(llama))
        expected, _ = expected_tensors(load_meta_model(source, "float32", "eager"))
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        check_checkpoint(source, expected, tied)
        files = {n: t for n, t in source.checkpoint.files.items() if n != "lm_head.weight"}
        check_checkpoint(replace(source, checkpoint=type(source.checkpoint)(files)), expected, tied)


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "mpt"])
def test_written_attention_is_what_hugging_face_runs_by_default(model_type):
    config = tiny_config(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    assert not calls_interface(config)
    assert written_attention(config) == model.config._attn_implementation
