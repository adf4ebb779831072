"""Keys of config.json: each has an effect, is known to have none, or is refused; spellings are one model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.front_end import trace_source
from tapeout.compiler.lower import lower
from tapeout.compiler.pipeline import PASSES, run_passes
from tapeout.model_defs import open_model
from tapeout.plugins.errors import TapeoutError, UnsupportedError

Make = Callable[..., Path]


@pytest.fixture
def checkpoint(models: Any, tmp_path: Path) -> Make:
    """`checkpoint("llama", changes={...})`: a tiny checkpoint whose config.json is changed (None removes)."""

    def make(model_type: str, changes: dict[str, Any] | None = None, **overrides: Any) -> Path:
        folder: Path = models.make_tiny(model_type, tmp_path / "model", **overrides)
        config = json.loads((folder / "config.json").read_text())
        for key, value in (changes or {}).items():
            config.pop(key, None)
            if value is not None:
                config[key] = value
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def digest(folder: Path) -> str:
    """Of the graph, with the constants it holds."""
    source = open_model(str(folder))
    graph, _ = trace_source(source, "float32")
    run_passes(graph, PASSES, {})
    constants = {name: array.tolist() for name, array in sorted(graph.constants.items())}
    return lower(graph).digest() + json.dumps(constants)


@pytest.fixture(scope="module")
def plain(models: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a Llama with the default rope."""
    return digest(models.make_tiny("llama", tmp_path_factory.mktemp("plain") / "model"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rope_tetha": 1e6}, "rope_tetha = 1000000.0"),
        ({"sliding_windows": 4}, "sliding_windows = 4"),
        ({"attention_multiplier": 0.5}, "attention_multiplier = 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "base": 5}},
            "rope_parameters.base = 5",
        ),
    ],
)
def test_a_key_that_nothing_reads(checkpoint: Make, changes: dict[str, Any], line: str) -> None:
    source = open_model(str(checkpoint("llama", changes)))
    with pytest.raises(UnsupportedError, match="ignored in silence") as caught:
        trace_source(source, "float32")
    assert f"  {line}" in caught.value.message


def test_keys_that_cannot_matter(checkpoint: Make) -> None:
    notes = {
        "attention_dropout": 0.1, "unsloth_version": "2024.9", "router_aux_loss_coef": 0.1, "made_up": None,
        "_name_or_path": "a/b", "use_cache": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    trace_source(open_model(str(checkpoint("llama", notes))), "float32")


def test_rope_base_in_each_spelling(checkpoint: Make, plain: str) -> None:
    new = digest(checkpoint("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}))
    old = digest(checkpoint("llama", {"rope_parameters": None, "rope_theta": 1e6}))
    assert new == old
    assert new != plain


def test_rope_scaling_in_each_spelling(checkpoint: Make, plain: str) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    new = digest(checkpoint("llama", {"rope_parameters": {**scaling, "rope_theta": 1e4}}))
    old = digest(checkpoint("llama", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": scaling}))
    assert new == old
    assert new != plain


def test_windows_in_each_spelling(checkpoint: Make) -> None:
    sizes = {"num_hidden_layers": 3, "sliding_window": 8}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    new = digest(checkpoint("gemma3_text", {"layer_types": kinds}, layer_types=kinds, **sizes))
    spelled = {"layer_types": None, "sliding_window_pattern": 3}
    assert digest(checkpoint("gemma3_text", spelled, layer_types=kinds, **sizes)) == new
    all_full = ["full_attention"] * 3
    assert digest(checkpoint("gemma3_text", {"layer_types": all_full}, layer_types=kinds, **sizes)) != new


@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim"),
    [(64, 4, 32), (60, 4, 16), (64, 4, 8)],
    ids=["wider", "uneven", "narrower"],
)
def test_head_dim_is_the_configs(checkpoint: Make, hidden: int, heads: int, head_dim: int) -> None:
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "head_dim": head_dim}
    graph, _ = trace_source(open_model(str(checkpoint("qwen3", **sizes))), "float32")
    (call, *_) = [n for n in graph.graph.nodes if "tapeout.attention" in str(n.target)]
    assert int(call.args[0].meta["val"].shape[-1]) == head_dim


def test_layers_missing_from_the_checkpoint(checkpoint: Make) -> None:
    with pytest.raises(TapeoutError, match=r"missing: model\.layers\.2\.") as caught:
        trace_source(open_model(str(checkpoint("llama", {"num_hidden_layers": 3}))), "float32")
    assert "check num_hidden_layers" in (caught.value.hint or "")


def test_experts_of_a_checkpoint_in_its_authors_layout(checkpoint: Make) -> None:
    """One tensor an expert on disk, one tensor a layer in the engine."""
    folder = checkpoint("mixtral", num_local_experts=4, sliding_window=None)
    source = open_model(str(folder))
    assert any("experts.3.w2.weight" in name for name in source.checkpoint.tensors)
    graph, _ = trace_source(source, "float32")
    texts = [ref.text() for ref in graph.weights.values() if "experts" in ref.text()]
    assert len(texts) == 4
    assert any(text.startswith("concat(stack(") for text in texts)


def test_an_expert_missing_from_the_checkpoint(checkpoint: Make) -> None:
    from safetensors.numpy import load_file, save_file

    folder = checkpoint("mixtral", num_local_experts=4, sliding_window=None)
    tensors = load_file(folder / "model.safetensors")
    (lost,) = [n for n in tensors if "layers.1." in n and "experts.2.w1" in n]
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TapeoutError, match=r"differ|wrong shape"):
        trace_source(open_model(str(folder)), "float32")
