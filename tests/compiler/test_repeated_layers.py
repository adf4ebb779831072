"""Tracing layers that are alike once gives what tracing all of them gives."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tapeout.compiler import trace as tracing
from tapeout.compiler.alike import alike
from tapeout.compiler.front_end import trace_source
from tapeout.compiler.graph import Graph
from tapeout.compiler.lower import lower
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.pipeline import expected_matches, passes_for, run_passes
from tapeout.compiler.repeated_layers import find_layers
from tapeout.model_defs import open_model

#: Two are traced, and at least two are copies; more where several kinds of layers take turns.
LAYERS = 4
ALTERNATING = ["sliding_attention", "full_attention"] * 3

#: What a family's model needs, and which of its layers are copied.
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "llama": ({}, [2, 3]),
    "gpt2": ({"n_layer": LAYERS}, [2, 3]),
    "gemma3_text": ({"num_hidden_layers": 6, "layer_types": ALTERNATING, "sliding_window": 16}, [4, 5]),
    "smollm3": ({"num_hidden_layers": 6, "no_rope_layers": [1, 1, 1, 0, 1, 1]}, [2, 4, 5]),
    "qwen3_moe": (
        {
            "num_hidden_layers": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
        [3, 4],
    ),
    "bloom": ({"n_layer": LAYERS}, [2, 3]),
    "falcon": ({"new_decoder_architecture": False}, [2, 3]),
}


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that were copied instead of traced."""
    found: list[int] = []
    real = tracing.expand

    def expand(*args: Any) -> None:
        real(*args)
        found.extend(args[-1])

    monkeypatch.setattr(tracing, "expand", expand)
    return found


def whole(monkeypatch: pytest.MonkeyPatch, path: Path) -> Graph:
    """The graph when every layer is traced."""
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "find_layers", lambda *_: None)
        return trace_source(open_model(str(path)), "float32")[0]


@pytest.mark.parametrize("model_type", CASES)
def test_the_graph_is_that_of_all_layers(
    models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int], model_type: str
) -> None:
    config, expected = CASES[model_type]
    path = models.make_tiny(model_type, tmp_path / "m", **{"num_hidden_layers": LAYERS, **config})
    source = open_model(str(path))
    short, full = trace_source(source, "float32")[0], whole(monkeypatch, path)
    assert copied == expected
    assert [str(n.target) for n in short.graph.nodes if n.op == "call_function"] == [
        str(n.target) for n in full.graph.nodes if n.op == "call_function"
    ]
    passes = passes_for(BuildOptions())
    counts = [run_passes(g, passes, expected_matches(source.config, passes)) for g in (short, full)]
    assert counts[0] == counts[1]
    assert list(short.weights.items()) == list(full.weights.items())
    for name in short.weights.keys() & short.constants.keys():
        assert np.array_equal(short.constants[name], full.constants[name])
    assert lower(short).text() == lower(full).text()


def test_layers_that_are_called_differently_are_all_traced(
    models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    """They look alike, but the model makes angles for each of them: the last is not given the second's."""
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from transformers.models.llama import modeling_llama

    def forward(
        self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, cache: Any, **_: Any
    ) -> BaseModelOutputWithPast:
        x = self.embed_tokens(input_ids)
        mask = modeling_llama.create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=None, cache=cache, position_ids=position_ids
        )
        for layer in self.layers:
            angles = self.rotary_emb(x, position_ids=position_ids)
            x = layer(x, attention_mask=mask, position_embeddings=angles, cache=cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    path = models.make_tiny("llama", tmp_path / "m", num_hidden_layers=4)
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    ours = trace_source(open_model(str(path)), "float32")[0]
    assert copied == []
    assert lower_fused(ours, path) == lower_fused(whole(monkeypatch, path), path)


def test_layers_of_code_that_is_not_the_librarys_are_all_traced(
    models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    """They look alike and the first two compute alike; the third's number is looked up by a function."""
    from transformers.models.llama import modeling_llama

    numbers = [1.0, 1.0, 3.0, 1.0]

    def number_of(layer: Any) -> float:
        return numbers[layer.self_attn.layer_idx]

    class Numbered(modeling_llama.LlamaDecoderLayer):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            given: torch.Tensor = super().forward(hidden_states, **kwargs)
            return given * number_of(self)

    path = models.make_tiny("llama", tmp_path / "m", num_hidden_layers=4)
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", Numbered)
    graph = trace_source(open_model(str(path)), "float32")[0]
    assert copied == []
    assert 3.0 in [a for n in graph.graph.nodes if "mul" in str(n.target) for a in n.args]


@pytest.mark.parametrize("asked", ["class", "weight"])
def test_what_asks_for_a_layers_class_or_weight_gets_that_of_the_layer(
    models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int], asked: str
) -> None:
    """The model's own code is the library's, and looks at its layers: a stand-in must answer as they do."""
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from transformers.models.llama import modeling_llama

    def forward(
        self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, cache: Any, **_: Any
    ) -> BaseModelOutputWithPast:
        x = self.embed_tokens(input_ids)
        mask = modeling_llama.create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=None, cache=cache, position_ids=position_ids
        )
        angles = self.rotary_emb(x, position_ids=position_ids)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_embeddings=angles, cache=cache)
            if asked == "weight":
                x = x * layer.input_layernorm.weight
            elif isinstance(layer, modeling_llama.LlamaDecoderLayer):
                x = x * 2
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    path = models.make_tiny("llama", tmp_path / "m", num_hidden_layers=4)
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    graph = trace_source(open_model(str(path)), "float32")[0]
    assert copied == ([2, 3] if asked == "class" else [])
    full = whole(monkeypatch, path)
    assert [str(n.target) for n in graph.graph.nodes if n.op == "call_function"] == [
        str(n.target) for n in full.graph.nodes if n.op == "call_function"
    ]
    assert list(graph.weights.items()) == list(full.weights.items())


def lower_fused(graph: Graph, path: Path) -> str:
    passes = passes_for(BuildOptions())
    run_passes(graph, passes, expected_matches(open_model(str(path)).config, passes))
    return lower(graph).text()


# ---- what counts as alike -------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer whose index goes to the cache alone, as Hugging Face's do."""

    def __init__(self, layer_idx: int, width: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.layer_idx, self.scale = layer_idx, scale
        self.linear = nn.Linear(width, width)
        self.register_buffer("table", torch.full((2,), scale))

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        if self.layer_idx is None:
            raise ValueError("no index")
        return self.linear(x if cache is None else cache.update(x, self.layer_idx))


class Scaled(Layer):
    """Computes with its index."""

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        return super().forward(x, cache) / (self.layer_idx + 1)


class Looking(Layer):
    """Asks its configuration by its index."""

    kinds = ("a", "b", "b", "a")

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        return -x if self.kinds[self.layer_idx] == "a" else super().forward(x, cache)


def test_layers_that_differ_in_weights_and_index_are_alike() -> None:
    assert alike(Layer(1), Layer(2), 1, 2)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Layer(1), Layer(2, width=8)),
        (Layer(1), Layer(2, scale=2.0)),
        (Layer(1), Scaled(2)),
        (Scaled(1), Scaled(2)),
        (Looking(1), Looking(2)),
    ],
    ids=["width", "attribute", "class", "computes-with-index", "subscripts-by-index"],
)
def test_other_layers_are_not(a: nn.Module, b: nn.Module) -> None:
    assert not alike(a, b, 1, 2)


def test_another_table_shared_weights_or_attributes_make_a_difference() -> None:
    a, b = Layer(1), Layer(2)
    b.table = torch.tensor([1.0, 3.0])
    assert not alike(a, b, 1, 2)
    b = Layer(2)
    b.linear.weight = a.linear.weight
    assert not alike(a, b, 1, 2)
    b = Layer(2)
    b.more = 3
    assert not alike(a, b, 1, 2)


def test_kinds_are_found_where_something_is_saved() -> None:
    class Model(nn.Module):
        def __init__(self, *layers: Layer) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(layers)

    tied = [Layer(i) for i in range(7)]
    tied[5].linear.weight = tied[3].linear.weight
    found = find_layers(Model(*tied), 7)
    assert found is not None
    assert [kind.members for kind in found.kinds] == [(0, 1, 2, 4, 6)]
    found = find_layers(Model(*(Layer(i, scale=float(i % 2)) for i in range(7))), 7)
    assert found is not None
    assert (found.name, [kind.members for kind in found.kinds]) == ("blocks", [(0, 2, 4, 6), (1, 3, 5)])
    assert found.parameter("blocks.2.linear.weight", 2, 6) == "blocks.6.linear.weight"
    assert found.parameter("blocks.20.linear.weight", 2, 6) == "blocks.20.linear.weight"
    assert find_layers(Model(*(Layer(i, scale=float(i // 2)) for i in range(6))), 6) is None
    assert find_layers(Model(Layer(0), Layer(1)), 2) is None
    assert find_layers(Model(*(Scaled(i) for i in range(6))), 6) is None
