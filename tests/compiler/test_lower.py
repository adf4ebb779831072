"""Lowering: windows and strides, ties, and everything that has no op listed at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tapeout.compiler.describe import kv_cache_layout
from tapeout.compiler.graph import aten
from tapeout.compiler.ir import Operand, parse, whole
from tapeout.compiler.lower import lower
from tapeout.compiler.pipeline import PASSES, run_passes
from tapeout.compiler.trace import trace
from tapeout.model_defs.meta_model import load_meta_model
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.registry import OPS, TRACE_ONLY_OPS
from tapeout.runtime.engine.program import STEP_INPUTS

CUDA = "cuda:sm_90"


def test_a_layer_of_llama(family: Callable[..., Any]) -> None:
    """Splits, heads and merges are windows: nothing is copied between the ops of a layer."""
    module = family("llama").module
    layer = [n.op for n in module.nodes]
    assert layer[:2] == ["embedding", "rope_table"]
    block = [
        "linear",
        "rope",
        "paged_attention",
        "linear",
        "add_rms_norm",
        "linear",
        "gated_activation",
        "linear",
    ]
    # Behind the last attention there are the sampled rows alone: of its result, and of the residual.
    last = [*block[:3], "select_rows", block[3], "select_rows", *block[4:]]
    assert layer[2:] == ["rms_norm", *block, "add_rms_norm", *last, "add_rms_norm", "linear"]
    qkv, rope, attention = module.nodes[3:6]
    (merged,), (rotated,) = qkv.outputs, rope.outputs
    assert merged.shape == ("T", 128)
    # 4 query and 2 key heads of 16 rotate together; values are the last two heads of the product.
    assert rope.inputs[0] == Operand(merged.name, ("T", 6, 16), (128, 16, 1))
    assert attention.inputs == (
        Operand(rotated.name, ("T", 4, 16), (96, 16, 1)),
        Operand(rotated.name, ("T", 2, 16), (96, 16, 1), 64),
        Operand(merged.name, ("T", 2, 16), (128, 16, 1), 96),
    )
    assert module.logits.shape == ("R", 300)
    assert [v.name for v in module.inputs] == list(STEP_INPUTS)


def test_a_layer_of_llama_for_a_gpu(family: Callable[..., Any]) -> None:
    module = family("llama", target=CUDA).module
    layer = ["norm_linear", "rope_attention", "linear_add", "norm_linear", "linear_add"]
    last = [*layer[:2], "select_rows", "select_rows", *layer[2:]]
    assert [n.op for n in module.nodes] == ["embedding", "rope_table", *layer, *last, "norm_linear"]
    qkv, attention, o, gate_up, down = module.nodes[2:7]
    (merged,), (table,) = qkv.outputs, module.nodes[1].outputs
    assert merged.shape == ("T", 128)
    # 4 query, 2 key and 2 value heads of 16 are windows of the product.
    assert attention.inputs == (
        Operand(merged.name, ("T", 4, 16), (128, 16, 1)),
        Operand(merged.name, ("T", 2, 16), (128, 16, 1), 64),
        Operand(merged.name, ("T", 2, 16), (128, 16, 1), 96),
        whole(table),
    )
    assert attention.weights == ("", "", "")
    assert [n.attrs["activation"] for n in (qkv, gate_up, module.nodes[-1])] == ["", "silu", ""]
    assert [n.inputs[1].value for n in (o, down)] == ["%0", o.outputs[0].name]
    assert gate_up.outputs[0].shape == ("T", 96)
    assert module.logits.shape == ("R", 300)
    assert parse(module.text()) == module


def test_norms_of_heads_are_part_of_attention_on_a_gpu(family: Callable[..., Any]) -> None:
    module = family("qwen3", target=CUDA).module
    calls = [n for n in module.nodes if n.op == "rope_attention"]
    assert [n.attrs["layer"] for n in calls] == [0, 1]
    for index, call in enumerate(calls):
        assert call.attrs["qk_norm"] is True
        names = [f"model.layers.{index}.self_attn.{x}_norm.weight" for x in ("q", "k")]
        assert call.weights == (*names, "")
        assert {o.strides for o in call.inputs[:3]} == {(128, 16, 1)}
    assert not [n for n in module.nodes if n.op in ("rms_norm", "rope", "linear", "add")]


def test_layers_without_positions_keep_plain_attention(family: Callable[..., Any]) -> None:
    module = family("smollm3", target=CUDA).module
    calls = [(n.op, n.attrs["layer"]) for n in module.nodes if OPS[n.op].reads_cache]
    assert calls == [("rope_attention", 0), ("paged_attention", 1)]
    assert kv_cache_layout(module).layers == 2


@pytest.mark.parametrize("target", ["cpu", CUDA])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "smollm3"])
def test_every_window_lies_inside_its_value(family: Callable[..., Any], model_type: str, target: str) -> None:
    config = {"lengths": (33, 11), "sliding_window": 8} if model_type == "gemma2" else {}
    module = family(model_type, target=target, **config).module
    values = module.values()
    defined = {v.name for v in module.inputs}
    for node in module.nodes:
        assert node.op in OPS.keys() - TRACE_ONLY_OPS
        for operand in node.inputs:
            assert operand.value in defined
            value = values[operand.value]
            row = torch.Size(int(d) for d in value.shape[1:]).numel()
            assert operand.shape[0] == value.shape[0]
            assert operand.strides[0] == row or len(value.shape) == 1
            dims = zip(operand.shape[1:], operand.strides[1:], strict=True)
            assert operand.offset + sum((int(d) - 1) * s for d, s in dims) < max(row, 1)
        defined |= {v.name for v in node.outputs}


def test_layers_are_numbered_and_windows_kept(family: Callable[..., Any]) -> None:
    module = family("gemma2", lengths=(33, 11), sliding_window=8).module
    attrs = [n.attrs for n in module.nodes if n.op == "paged_attention"]
    assert [(a["layer"], a["window"], a["softcap"]) for a in attrs] == [(0, 8, 50.0), (1, 0, 50.0)]


def test_tied_embeddings_are_one_weight(family: Callable[..., Any]) -> None:
    untied, tied = family("llama"), family("qwen2", tie_word_embeddings=True)
    uses = Counter(w for n in tied.module.nodes for w in n.weights if w)
    assert uses["model.embed_tokens.weight"] == 2
    assert "lm_head.weight" not in tied.module.weights
    assert "lm_head.weight" in untied.module.weights


def test_equal_recipes_are_one_weight(family: Callable[..., Any]) -> None:
    """Also where the model holds two parameters: only the recipe counts."""
    source = family("llama").source
    model = load_meta_model(source, "float32", "tapeout")
    graph = trace(model, lambda name: WeightRef.of(source.checkpoint.tensors[name]))
    run_passes(graph, PASSES, {})
    graph.weights["lm_head.weight"] = graph.weights["model.embed_tokens.weight"]
    module = lower(graph)
    assert Counter(w for n in module.nodes for w in n.weights)["model.embed_tokens.weight"] == 2
    assert "lm_head.weight" not in module.weights


def test_all_unknown_ops_are_listed_at_once(family: Callable[..., Any]) -> None:
    graph = family("llama").traced()
    run_passes(graph, PASSES, {})
    products = graph.nodes(torch.ops.tapeout.gated_activation.default)
    assert len(products) == 2
    for product, op in zip(products, (aten.erf.default, aten.cumsum.default), strict=True):
        args = (1,) if op is aten.cumsum.default else ()
        users = list(product.users)
        changed = graph.call(users[0], op, product, *args)
        users[0].replace_input_with(product, changed)
    graph.tidy()
    with pytest.raises(UnsupportedError) as caught:
        lower(graph)
    lines = caught.value.message.splitlines()
    assert lines[1:] == [
        "  aten.erf.default (node erf_default)",
        "  aten.cumsum.default (node cumsum_default)",
    ]
    assert caught.value.exit_code == 5
    assert caught.value.hint is not None
    assert "plugins/README.md" in caught.value.hint


def test_rows_must_lead(family: Callable[..., Any]) -> None:
    graph = family("llama").traced()
    run_passes(graph, PASSES, {})
    rows = graph.nodes(torch.ops.tapeout.select_rows.default)[0]
    turned = graph.call(rows, aten.transpose.int, rows.args[0], 1, 2)
    rows.args = (turned, rows.args[1])
    with pytest.raises(UnsupportedError, match="whose rows do not lead"):
        lower(graph)
