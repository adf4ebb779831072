"""The driver of the passes: counts that do not fit, places it points at, dumps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_graph import HIDDEN, Lines, Make, T, norm, randn

from tapeout.compiler.graph import Graph, aten
from tapeout.compiler.near_miss import near_misses
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.passes.canonicalize import canonicalize
from tapeout.compiler.passes.fuse_rms_norm import fuse_rms_norm
from tapeout.compiler.passes.quantize_linears import quantize_linears
from tapeout.compiler.pipeline import CUDA_PASSES, PASSES, expected_matches, passes_for, run_passes
from tapeout.plugins.errors import UnsupportedError


def _spoil_query_projection(graph: Graph, layer: int) -> None:
    """Double what the layer's query projection reads: three linears of one input are no longer there."""
    (query,) = [
        n for n in graph.nodes(aten.linear.default) if f"layers_{layer}_self_attn_q" in str(n.args[1])
    ]
    query.update_arg(0, graph.call(query, aten.mul.Tensor, query.args[0], 2.0))


class TestDriver:
    def test_a_miss_names_the_module_that_was_left_out(self, family: Callable[..., Any]) -> None:
        graph = family("llama").traced()
        expected = {"merge_qkv": 2}
        _spoil_query_projection(graph, layer=1)
        with pytest.raises(UnsupportedError) as caught:
            run_passes(graph, PASSES, expected)
        assert caught.value.message.splitlines() == [
            "pass merge_qkv matched 1 places, expected 2 from the model's config; not matched:",
            "  attention_1 (tapeout.attention.default) in model.layers.1.self_attn",
        ]

    def test_places_that_look_like_a_match_are_there_before_a_pass_and_gone_after(
        self, family: Callable[..., Any]
    ) -> None:
        source, graph = family("llama").source, family("llama").traced()
        counted = expected_matches(source.config)
        assert all(near_misses(graph, name) for name in counted)
        left: dict[str, list[str]] = {}
        run_passes(graph, PASSES, {}, after_each=lambda name, g: left.update({name: near_misses(g, name)}))
        assert {name: left[name] for name in counted} == {name: [] for name in counted}

    def test_the_passes_for_gpus_have_such_places_too(self, family: Callable[..., Any]) -> None:
        """Right before a pass and right after it: earlier passes make what later ones look for."""
        source, graph = family("llama").source, family("llama").traced()
        names = [p.__name__ for p in CUDA_PASSES]
        seen: list[dict[str, list[str]]] = []
        run_passes(
            graph,
            CUDA_PASSES,
            expected_matches(source.config, CUDA_PASSES),
            after_each=lambda name, g: seen.append({n: near_misses(g, n) for n in names}),
        )
        for name in ("fuse_rope_attention", "select_rows_early", "fuse_linear_add", "fuse_norm_linear"):
            index = names.index(name)
            assert seen[index - 1][name], name
            assert seen[index][name] == [], name

    def test_a_miss_among_them_names_its_layer(self, family: Callable[..., Any]) -> None:
        source, graph = family("llama").source, family("llama").traced()
        expected = expected_matches(source.config, CUDA_PASSES)

        def read_a_rotation_twice(name: str, graph: Graph) -> None:
            if name == "page_attention":
                rope = graph.nodes(torch.ops.tapeout.rope.default)[1]
                (output,) = graph.graph.find_nodes(op="output")
                output.args = ((*output.args[0], rope),)

        with pytest.raises(UnsupportedError) as caught:
            run_passes(graph, CUDA_PASSES, expected, after_each=read_a_rotation_twice)
        first, *places = caught.value.message.splitlines()
        assert first.startswith("pass fuse_rope_attention matched 1 places, expected 2")
        assert [p.rpartition(" in ")[2] for p in places] == ["model.layers.1.self_attn"]

    def test_the_target_decides_which_passes_run(self) -> None:
        assert passes_for(BuildOptions(target="cpu")) == passes_for(BuildOptions()) == PASSES
        assert passes_for(BuildOptions(target="cuda:sm_90")) == CUDA_PASSES
        assert passes_for(BuildOptions(quantize="int8-dynamic")) == (*PASSES, quantize_linears)

    def test_a_wrong_count_names_pass_and_both_numbers(self, small_graph: Make) -> None:
        graph = small_graph(Lines(lambda m, x: norm(x, m.w), w=(HIDDEN,)), x=randn(1, T, HIDDEN))
        with pytest.raises(UnsupportedError) as caught:
            run_passes(graph.graph, (fuse_rms_norm,), {"fuse_rms_norm": 2})
        message = "pass fuse_rms_norm matched 1 places, expected 2 from the model's config"
        assert caught.value.message == message
        assert caught.value.hint is not None
        assert "--dump" in caught.value.hint

    def test_what_the_config_does_not_tell_is_not_checked(self, small_graph: Make) -> None:
        graph = small_graph(Lines(lambda m, x: norm(x, m.w), w=(HIDDEN,)), x=randn(1, T, HIDDEN))
        assert run_passes(graph.graph, (fuse_rms_norm,), {"fuse_rms_norm": None}) == {"fuse_rms_norm": 1}

    def test_dumps_are_numbered_and_name_the_weights(self, small_graph: Make, tmp_path: Any) -> None:
        graph = small_graph(Lines(lambda m, x: norm(x, m.w), w=(HIDDEN,)), x=randn(1, T, HIDDEN))
        run_passes(graph.graph, (canonicalize, fuse_rms_norm), {}, dump=tmp_path / "d")
        names = ["00_trace.txt", "01_canonicalize.txt", "02_fuse_rms_norm.txt"]
        assert sorted(p.name for p in (tmp_path / "d").iterdir()) == names
        texts = [(tmp_path / "d" / n).read_text() for n in names]
        assert all("# w = w: float32[8]" in t for t in texts)
        assert ["rms_norm" in t for t in texts] == [False, False, True]
