"""Traced graphs against Hugging Face: after every pass the graph runs and gives HF's logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tapeout.compiler.front_end import trace_source
from tapeout.compiler.graph import run_graph
from tapeout.compiler.interface import INTERFACE
from tapeout.compiler.pipeline import CUDA_PASSES, PASSES, expected_matches
from tapeout.compiler.trace import trace
from tapeout.model_defs.meta_model import load_meta_model
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import UnsupportedError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3", "phi3")
CUDA = "cuda:sm_90"
CUDA_FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3")
#: Every family on the CPU, those that differ in what is fused for GPUs.
CASES = [*((f, "cpu") for f in FAMILIES), *((f, CUDA) for f in CUDA_FAMILIES)]
PASS_NAMES = {t: [p.__name__ for p in passes] for t, passes in (("cpu", PASSES), (CUDA, CUDA_PASSES))}
LOGITS_TOLERANCE = 1e-4

# Windows of 8 with prompts of four windows: a window off by one changes the logits.
WINDOW = {"gemma2": {"sliding_window": 8}, "gemma3_text": {"sliding_window": 8}}


def get(family: Callable[..., Any], model_type: str, target: str = "cpu") -> Any:
    if model_type in WINDOW:
        return family(model_type, target=target, lengths=(33, 11), **WINDOW[model_type])
    return family(model_type, target=target)


@pytest.mark.parametrize(("model_type", "target"), CASES)
def test_after_every_pass_the_graph_gives_hf_logits(
    family: Callable[..., Any], model_type: str, target: str
) -> None:
    tiny = get(family, model_type, target)
    assert tiny.graph is not None
    expected = tiny.reference("float32")
    assert list(tiny.logits) == PASS_NAMES[target]
    for name, logits in tiny.logits.items():
        difference = (logits - expected).abs().max().item()
        assert difference <= LOGITS_TOLERANCE, f"after {name}: logits differ by {difference:.3g}"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_match_counts_are_the_facts(family: Callable[..., Any], model_type: str) -> None:
    tiny = get(family, model_type)
    assert tiny.graph is not None
    expected = expected_matches(tiny.source.config)
    assert {"fuse_rms_norm", "fuse_rope", "merge_qkv", "fuse_gated_mlp", "page_attention"} <= expected.keys()
    assert None not in expected.values()
    assert {name: tiny.counts[name] for name in expected} == expected
    # Pre-norm families add the residual right in front of every norm but the first.
    assert tiny.counts["fuse_add_rms_norm"] == 2 * tiny.source.config.num_hidden_layers


@pytest.mark.parametrize("model_type", CUDA_FAMILIES)
def test_match_counts_for_gpus_are_the_facts(family: Callable[..., Any], model_type: str) -> None:
    tiny = get(family, model_type, CUDA)
    assert tiny.graph is not None
    expected = expected_matches(tiny.source.config, CUDA_PASSES)
    fused = {"fuse_rope_attention", "select_rows_early", "fuse_linear_add", "fuse_norm_linear"}
    assert fused <= expected.keys()
    assert None not in expected.values()
    assert {name: tiny.counts[name] for name in expected} == expected
    # The linears behind the norms took them all.
    assert tiny.counts["fuse_add_rms_norm"] == 0


@pytest.mark.parametrize(("model_type", "target"), CASES)
def test_the_graph_shrinks(family: Callable[..., Any], model_type: str, target: str) -> None:
    tiny = get(family, model_type, target)
    assert tiny.graph is not None
    nodes = {"trace": tiny.trace_nodes, **tiny.nodes}
    assert nodes[PASS_NAMES[target][-1]] < nodes["trace"] / 2
    for (_, before), (name, after) in itertools.pairwise(nodes.items()):
        if name in ("canonicalize", "fuse_rms_norm", "fuse_rope"):
            assert after < before, name


@pytest.mark.parametrize("model_type", FAMILIES)
def test_nothing_unfused_is_left(family: Callable[..., Any], model_type: str) -> None:
    tiny = get(family, model_type)
    assert tiny.graph is not None
    left = tiny.ops[PASS_NAMES["cpu"][-1]]
    for gone in ("aten.rsqrt.default", "aten.cat.default", "aten.cos.default", "aten.neg.default"):
        assert gone not in left
    assert "tapeout.attention.default" not in left


def test_the_window_is_what_makes_the_difference(family: Callable[..., Any]) -> None:
    """The prompts do reach beyond the window: HF with another window gives other logits."""
    tiny = get(family, "gemma3_text")
    model = tiny.hf("float32")
    model.config.sliding_window = 9
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 9
    ids = torch.tensor([tiny.packed.sequences[0]])
    with torch.no_grad():
        other = model(ids).logits[0]
    assert (other - tiny.reference("float32")[: other.shape[0]]).abs().max() > 100 * LOGITS_TOLERANCE


@pytest.mark.parametrize("target", ["cpu", CUDA])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_final_graph_continues_from_its_cache(
    family: Callable[..., Any], model_type: str, target: str
) -> None:
    """A chunk of each prompt, then the rest: the second step reads what the first wrote."""
    tiny = get(family, model_type, target)
    graph, weights, whole = tiny.graph, tiny.weights(tiny.graph), tiny.inputs()
    split = [9, 3]
    lengths = [len(s) for s in tiny.packed.sequences]
    logits = [torch.empty(n, 0) for n in lengths]
    for starts, stops in (([0, 0], split), (split, lengths)):
        sequences = tiny.packed.sequences
        rows = [list(range(a, b)) for a, b in zip(starts, stops, strict=True)]
        counts = [len(r) for r in rows]
        step = whole | {
            "token_ids": torch.tensor([[sequences[i][p] for i, r in enumerate(rows) for p in r]]),
            "positions": torch.tensor([[p for r in rows for p in r]]),
            "row_ids": torch.arange(sum(counts)),
            "cu_q": torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32),
            "kv_lens": torch.tensor(stops, dtype=torch.int32),
        }
        parts = run_graph(graph, weights, step)[0].split(counts)
        logits = [torch.cat([a, b]) if a.shape[1] else b for a, b in zip(logits, parts, strict=True)]
    assert (torch.cat(logits) - tiny.reference("float32")).abs().max() <= LOGITS_TOLERANCE


@pytest.mark.parametrize("target", ["cpu", CUDA])
def test_bfloat16_is_as_near_to_float32_as_hf_is(family: Callable[..., Any], target: str) -> None:
    """Kernels round at other places than HF's, so bfloat16 logits cannot be equal. What can be asked is
    that the graph is no worse an approximation of the float32 model than HF's own bfloat16 is, up to
    twice: the two errors are independent and of one size."""
    tiny = family("llama", target=target, dtype="bfloat16")
    assert tiny.graph is not None
    exact, rounded = tiny.reference("float32"), tiny.reference("bfloat16")
    allowed = 2 * (rounded - exact).abs().max()
    assert list(tiny.logits) == PASS_NAMES[target]
    for name, logits in tiny.logits.items():
        assert (logits - exact).abs().max() <= allowed, name
    # It did compute in bfloat16.
    assert (tiny.logits["canonicalize"] - exact).abs().max() > 1e-3


def test_norm_variants_keep_their_order_of_rounding_in_bfloat16(family: Callable[..., Any]) -> None:
    """In bfloat16 `weight * x.to(bf16)` and `(weight * x).to(bf16)` differ; the fused op must say which."""
    tiny = family("llama", dtype="bfloat16")
    norms = [n for n in tiny.module.nodes if n.op in ("rms_norm", "add_rms_norm")]
    assert {n.attrs["cast_before_weight"] for n in norms} == {True}


class TestRefused:
    def test_a_layer_without_attention(self, family: Callable[..., Any]) -> None:
        source = family("llama").source
        model = load_meta_model(source, "float32", "tapeout")
        model.model.layers[1].self_attn = _Silent()
        with pytest.raises(
            UnsupportedError, match=r"has 2 layers but its attention was seen in layers\s+\[0\]"
        ):
            trace(model, lambda name: WeightRef.of(source.checkpoint.tensors[name]))

    def test_code_that_cannot_be_exported(self, family: Callable[..., Any]) -> None:
        source = family("llama").source
        model = load_meta_model(source, "float32", "tapeout")
        model.model.norm = _DataDependent()
        with pytest.raises(
            UnsupportedError, match=r"LlamaForCausalLM \(model_type 'llama'\) cannot be traced"
        ) as caught:
            trace(model, lambda name: WeightRef.of(source.checkpoint.tensors[name]))
        assert "TAPEOUT_TRACEBACK" in caught.value.render()

    def test_an_attention_argument_that_is_not_known(self, family: Callable[..., Any]) -> None:
        source = family("llama").source
        model = load_meta_model(source, "float32", "tapeout")
        attention = model.model.layers[0].self_attn
        forward = attention.forward
        attention.forward = lambda *a, **k: forward(*a, **k, alibi=torch.ones(4))
        with pytest.raises(UnsupportedError, match=r"LlamaAttention takes arguments .* \['alibi'\]"):
            trace(model, lambda name: WeightRef.of(source.checkpoint.tensors[name]))


class _Silent(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


class _DataDependent(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_tracing_leaves_no_weights_in_memory(family: Callable[..., Any]) -> None:
    graph, _ = trace_source(family("llama").source, "float32")
    assert all(ref.source_names() for ref in graph.weights.values())
    # Constants are small tables (inverse frequencies), never parameters.
    assert sum(array.nbytes for array in graph.constants.values()) < 1024


def test_heads_of_different_sizes_are_refused_by_name() -> None:
    q, v = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 8)
    with pytest.raises(UnsupportedError, match=r"of Linear has heads of sizes \[16, 16, 8\]") as caught:
        ALL_ATTENTION_FUNCTIONS[INTERFACE](nn.Linear(1, 1), q, q, v, None)
    assert "latent" in (caught.value.hint or "")
