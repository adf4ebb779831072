"""GGUF files: SmolLM2 against transformers' own reading, tiny files of every family, damage."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import gguf.quants
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint

from tapeout.model_defs import open_model
from tapeout.model_defs.gguf_families import FAMILIES as BUILT
from tapeout.model_defs.gguf_families import REFUSED
from tapeout.model_defs.gguf_file import can_dequantize, read_gguf
from tapeout.model_defs.weights import run_recipe
from tapeout.plugins.errors import UnsupportedError

SMOLLM2_CONFIG = {"num_attention_heads": 9, "num_key_value_heads": 3}


def logits_of(source, ids):
    """Logits of HF's model filled with the source's tensors."""
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32).eval()
    read = source.checkpoint.read
    parts = {name for ref in source.recipes.values() for name in ref.source_names()}
    state = {n: torch.from_numpy(read(n)) for n in source.checkpoint.tensors if n not in parts}
    state |= {n: torch.from_numpy(run_recipe(ref, read)) for n, ref in source.recipes.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        return model(ids).logits


class TestSmolLM2:
    def test_config_and_token_ids_come_from_the_metadata(self, smollm2):
        source = smollm2
        assert source.origin == "gguf:Q4_1"
        assert source.config.model_type == "llama"
        assert source.config.rope_parameters["rope_theta"] == 100000.0
        assert source.config.tie_word_embeddings
        assert source.eos_token_ids == (2,)
        assert (source.bos_token_id, source.pad_token_id) == (1, 2)
        assert source.tokenizer_vocab_size == source.config.vocab_size == 49152
        assert source.special_tokens["eos_token"] == "<|im_end|>"
        assert "<|im_start|>assistant" in source.chat_template

    @pytest.mark.parametrize(
        ("hf_name", "gguf_name"),
        [
            ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
            ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight"),
            ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight"),
            ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
            ("model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
            ("model.norm.weight", "output_norm.weight"),
        ],
    )
    def test_tensors_equal_transformers(self, smollm2, smollm2_path, hf_name, gguf_name):
        raw = _hf_state(smollm2_path)[gguf_name][...].numpy()
        kind = gguf.GGMLQuantizationType(_hf_header(smollm2_path).ggml_types[gguf_name])
        values = gguf.dequantize(raw, kind)
        want = LlamaTensorProcessor(config=SMOLLM2_CONFIG).process(values, gguf_name).weights
        got = smollm2.checkpoint.read(hf_name)
        assert got.dtype == np.float32
        assert got.shape == smollm2.checkpoint.tensors[hf_name].shape
        assert np.array_equal(got, want)

    def test_every_parameter_has_a_tensor(self, smollm2):
        with torch.device("meta"):
            state = AutoModelForCausalLM.from_config(smollm2.config).state_dict()
        shapes = {n: tuple(t.shape) for n, t in state.items() if n != "lm_head.weight"}
        assert {n: i.shape for n, i in smollm2.checkpoint.tensors.items()} == shapes


def test_digest_depends_on_bytes_only(llama, write_gguf, tmp_path):
    path = write_gguf(llama, tmp_path / "a.gguf", arch="llama")
    digest = open_model(str(path)).checkpoint.digest()
    path = path.rename(tmp_path / "b.gguf")
    assert open_model(str(path)).checkpoint.digest() == digest
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    assert open_model(str(path)).checkpoint.digest() != digest


def _hf_header(path: Path) -> GgufHeader:
    return GgufHeader.from_file(str(path))


def _hf_state(path: Path):
    return load_gguf_state_dict(_hf_header(path))


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip

GGML = gguf.GGMLQuantizationType
DEQUANTIZABLE = [GGML.F32, GGML.F16, *gguf.quants._type_traits]

# HF's model type, GGUF architecture, metadata beside the sizes, what the HF config sets.
FAMILIES = [
    ("llama", "llama", {"llama.rope.freq_base": 10000.0}, {}),
    ("llama", "llama", {"llama.rope.freq_base": 10000.0}, {"attention_bias": True, "mlp_bias": True}),
    ("mistral", "mistral", {"mistral.rope.freq_base": 10000.0}, {"head_dim": 32}),
    ("mixtral", "llama", {}, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ("qwen2", "qwen2", {"qwen2.rope.freq_base": 10000.0}, {}),
    ("qwen2_moe", "qwen2moe", {}, {**EXPERTS, "shared_expert_intermediate_size": 48}),
    ("qwen3", "qwen3", {"qwen3.rope.freq_base": 10000.0}, {"tie_word_embeddings": True}),
    ("qwen3_moe", "qwen3moe", {}, {**EXPERTS, "norm_topk_prob": True, "head_dim": 32}),
    ("gemma2", "gemma2", {"gemma2.attention.sliding_window": 16}, {"query_pre_attn_scalar": 16}),
    (
        "gemma3_text",
        "gemma3",
        {"gemma3.attention.sliding_window": 16},
        {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 2},
    ),
    (
        "gemma3_text",
        "gemma3",
        {"gemma3.attention.sliding_window": 16, "gemma3.attention.sliding_window_pattern": 2},
        {"query_pre_attn_scalar": 16},
    ),
    ("phi3", "phi3", {"phi3.rope.freq_base": 10000.0}, {}),
    ("phi3", "phi3", {"phi3.attention.sliding_window": 16}, {"sliding_window": 16}),
    (
        "gpt_oss",
        "gpt-oss",
        {
            "gpt-oss.attention.sliding_window": 16,
            "gpt-oss.rope.freq_base": 150000.0,
            "gpt-oss.rope.scaling.type": "yarn",
            "gpt-oss.rope.scaling.factor": 8.0,
            "gpt-oss.rope.scaling.original_context_length": 64,
        },
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16, "rope_parameters": YARN},
    ),
    (
        "minimax_m2",
        "minimax-m2",
        {
            "minimax-m2.rope.freq_base": 5000000.0,
            "minimax-m2.expert_gating_func": 2,
            "minimax-m2.expert_feed_forward_length": 96,
        },
        {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    ("falcon", "falcon", {}, {}),
    ("falcon", "falcon", {}, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    (
        "falcon",
        "falcon",
        {},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    ("bloom", "bloom", {}, {}),
    ("stablelm", "stablelm", {"stablelm.use_parallel_residual": False}, {"partial_rotary_factor": 0.5}),
    (
        "stablelm",
        "stablelm",
        {"stablelm.use_parallel_residual": True},
        {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    ("gpt2", "gpt2", {}, {}),
    ("starcoder2", "starcoder2", {"starcoder2.rope.freq_base": 100000.0}, {"rope_theta": 100000.0}),
    ("nemotron", "nemotron", {"nemotron.rope.freq_base": 10000.0}, {"partial_rotary_factor": 0.5}),
]


@pytest.mark.parametrize(("model_type", "arch", "metadata", "overrides"), FAMILIES)
def test_a_converted_model_computes_what_the_original_does(
    models, write_gguf, tmp_path, model_type, arch, metadata, overrides
):
    folder = models.make_tiny(model_type, tmp_path / "hf", **overrides)
    path = write_gguf(folder, tmp_path / "model.gguf", arch=arch, metadata=metadata)
    source = open_model(str(path))
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
    torch.testing.assert_close(logits_of(source, ids), want, rtol=1e-5, atol=1e-5)
    assert source.origin == "gguf:F32"
    assert source.eos_token_ids == (1, 4)  # end of text and end of turn
    original = open_model(str(folder))
    assert source.chat_template == original.chat_template
    assert source.special_tokens["bos_token"] == original.special_tokens["bos_token"]


# What transformers' own loader makes of these files: nothing, or values that the original does not have.
HF_FAILS = {"mistral": NotImplementedError, "mixtral": NotImplementedError, "gpt_oss": TypeError}
HF_LEAVES = (
    (r"self_attn\.[qk]_layernorm\.norms\.\d+\.weight", "norms of heads stay random"),
    (r"self_attention\.query_key_value\.weight", "rows of grouped kv heads stay in llama.cpp's order"),
)


@pytest.mark.parametrize(("model_type", "arch", "metadata", "overrides"), FAMILIES)
def test_tensors_and_config_equal_transformers_reading_of_the_same_file(
    models, write_gguf, tmp_path, model_type, arch, metadata, overrides
):
    folder = models.make_tiny(model_type, tmp_path / "hf", **overrides)
    path = write_gguf(folder, tmp_path / "model.gguf", arch=arch, metadata=metadata)
    source = open_model(str(path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(source.config)
    if model_type in HF_FAILS:  # the test above has the model it came from as its measure
        with pytest.raises(HF_FAILS[model_type]):
            load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
        return
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    read, parts = source.checkpoint.read, {n for r in source.recipes.values() for n in r.source_names()}
    ours = {n: read(n) for n in source.checkpoint.tensors if n not in parts}
    ours |= {n: run_recipe(ref, read) for n, ref in source.recipes.items()}
    assert theirs["tensors"].keys() <= ours.keys()
    different = {
        name
        for name, values in ours.items()
        if name not in theirs["tensors"] or not np.array_equal(theirs["tensors"][name].numpy(), values)
    }
    grouped = source.config.to_dict().get("new_decoder_architecture") or "norms" in "".join(ours)
    known = {n for n in ours for pattern, _ in HF_LEAVES if re.search(pattern, n)} if grouped else set()
    assert different == known
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        assert getattr(source.config, key, None) == theirs["config"].get(
            key, getattr(source.config, key, None)
        )


@pytest.mark.parametrize("kind", DEQUANTIZABLE, ids=lambda kind: kind.name)
def test_every_tensor_type_gives_the_values_of_the_gguf_package(kind, tmp_path):
    """Random blocks: all bit patterns, not only those a quantizer writes."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind))
    rows = 3 * 32 + 5
    blocks = random.integers(0, 256, (rows, 2 * block_bytes), dtype=np.uint8)
    if kind in (GGML.F32, GGML.F16, GGML.BF16):  # no NaN: they would not be equal to themselves
        plain = {GGML.F32: np.float32, GGML.F16: np.float16}.get(kind, ml_dtypes.bfloat16)
        blocks = random.normal(size=(rows, 2 * block)).astype(plain).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", blocks, raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    file = read_gguf(tmp_path / "m.gguf")
    assert file.tensors["t"].type == kind
    assert file.tensors["t"].shape == (rows, 2 * block)
    with np.errstate(all="ignore"):
        want = gguf.dequantize(blocks, kind)
        got = file.dequantize("t")
    assert got.dtype == np.float32
    assert np.unique(got).size > 8
    assert np.array_equal(got, want.astype(np.float32), equal_nan=True)


def test_llama3_scaling_is_recovered_from_its_divisors(models, write_gguf, tmp_path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    folder = models.make_tiny("llama", tmp_path / "hf", head_dim=64, rope_parameters=scaling)
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() == pytest.approx(8.0)
    metadata = {"llama.rope.freq_base": 500000.0}
    path = write_gguf(
        folder, tmp_path / "m.gguf", arch="llama", metadata=metadata, extra={"rope_freqs.weight": divisors}
    )
    rope = open_model(str(path)).config.rope_parameters
    assert rope.pop("factor") == pytest.approx(8.0)
    assert rope == {k: v for k, v in scaling.items() if k != "factor"}

    bad = write_gguf(
        folder, tmp_path / "b.gguf", arch="llama", metadata=metadata, extra={"rope_freqs.weight": divisors**2}
    )
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        open_model(str(bad))


def test_rope_scaling_keys_are_not_dropped(models, write_gguf, tmp_path):
    folder = models.make_tiny("llama", tmp_path / "hf")
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    source = open_model(str(write_gguf(folder, tmp_path / "l.gguf", arch="llama", metadata=linear)))
    assert source.config.rope_parameters["rope_type"] == "linear"
    assert source.config.rope_parameters["factor"] == 4.0
    odd = write_gguf(folder, tmp_path / "o.gguf", arch="llama", metadata={"llama.rope.scaling.type": "magic"})
    with pytest.raises(UnsupportedError, match="magic"):
        open_model(str(odd))


def test_every_architecture_transformers_reads_is_built_or_refused_by_name():
    from transformers.integrations.gguf import GGUF_ARCHS, GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    theirs = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer"}
    spelled = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
               "minimax_m2": "minimax-m2"}  # fmt: skip
    assert {spelled.get(name, name) for name in theirs} <= BUILT.keys() | REFUSED.keys()
    assert not BUILT.keys() & REFUSED.keys()
    assert {arch for _, arch, _, _ in FAMILIES} == BUILT.keys()


def test_types_the_gguf_package_cannot_dequantize():
    assert {kind for kind in GGML if can_dequantize(kind)} == set(DEQUANTIZABLE)
