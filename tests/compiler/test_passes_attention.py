"""Rotation, projections, cache of attention: ops before and after, equal results, near misses left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_graph import HEADS, HIDDEN, KV_HEADS, Lines, Make, T, check, randn, unchanged

from tapeout.compiler.passes.fuse_rope import fuse_rope
from tapeout.compiler.passes.merge_qkv import merge_qkv
from tapeout.compiler.passes.page_attention import page_attention
from tapeout.plugins.errors import UnsupportedError

SCALING = 1.5  # of YaRN and the like


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def table(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    freqs = positions[..., None].float() * inv_freq.to(positions.device)
    both = torch.cat((freqs, freqs), dim=-1)
    return (both.cos() * SCALING).unsqueeze(1), (both.sin() * SCALING).unsqueeze(1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """q, k, v [1, T, H, D]"""
    return torch.ops.tapeout.attention(q, k, v, positions, None, None, 0, 0.5, 0, 0.0, False)


INV_FREQ = {"inv_freq": torch.tensor([1.0, 0.1])}


class TestFuseRope:
    def graph(self, make: Make, rotation: Callable[..., Any]) -> Any:
        def lines(m: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            cos, sin = table(positions, m.inv_freq)
            heads = (x * m.w).view(1, -1, 2, 4).transpose(1, 2)
            q, k = rotation(m, heads, cos, sin).transpose(1, 2), heads.transpose(1, 2)
            return attention(q, k, k, positions)

        module = Lines(lines, INV_FREQ, w=(HIDDEN,))
        return make(module, x=randn(1, T, HIDDEN), positions=torch.arange(T)[None])

    def test_before_and_after(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, lambda m, x, cos, sin: rotate(x, cos, sin))
        assert graph.ops()["aten.cat.default"] == 2
        assert graph.apply(fuse_rope) == 1
        assert graph.ops() == {
            "aten.mul.Tensor": 1,
            "aten.view.default": 1,
            "tapeout.rope_table.default": 1,
            "tapeout.rope.default": 1,
            "tapeout.attention.default": 1,
        }
        (node,) = graph.graph.nodes(torch.ops.tapeout.rope_table.default)
        assert node.args[2:] == (SCALING, "float32")
        torch.testing.assert_close(graph.run(), graph.expected())

    def test_query_and_key_share_one_table(self, small_graph: Make) -> None:
        graph = self.graph(
            small_graph, lambda m, x, cos, sin: rotate(x, cos, sin) + rotate(x.tanh(), cos, sin)
        )
        assert graph.apply(fuse_rope) == 2
        assert graph.ops()["tapeout.rope_table.default"] == 1
        torch.testing.assert_close(graph.run(), graph.expected())

    @pytest.mark.parametrize(
        "rotation",
        [
            # the halves are not swapped, a quarter is
            lambda m, x, c, s: x * c + torch.cat((-x[..., 3:], x[..., :3]), -1) * s,
            # interleaved pairs
            lambda m, x, c, s: x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s,
            # a cosine that is none
            lambda m, x, c, s: rotate(x, c * 2, s),
        ],
    )
    def test_near_misses(self, small_graph: Make, rotation: Callable[..., Any]) -> None:
        graph = self.graph(small_graph, rotation)
        unchanged(graph, fuse_rope)

    @pytest.mark.parametrize(
        ("rotation", "interleaved", "scaling"),
        [
            # turned the other way
            (lambda x, c, s: x * c + torch.cat((x[..., 2:], -x[..., :2]), -1) * s, False, SCALING),
            # halves that are turned one by one
            (lambda x, c, s: torch.cat((x[..., :2] * c[..., :2] - x[..., 2:] * s[..., :2],
                                        x[..., 2:] * c[..., :2] + x[..., :2] * s[..., :2]), -1),
             False, SCALING),
            # pairs
            (lambda x, c, s: x * c[..., :2].repeat_interleave(2, -1)
             + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
             * s[..., :2].repeat_interleave(2, -1), True, SCALING),
            # complex numbers
            (lambda x, c, s: torch.view_as_real(
                torch.view_as_complex(x.reshape(*x.shape[:-1], 2, 2)) * torch.complex(c[..., :2], s[..., :2])
             ).flatten(-2), True, SCALING),
            # a factor more
            (lambda x, c, s: rotate(x, c * 2, s * 2), False, 2 * SCALING),
        ],
        ids=["backwards", "halves", "pairs", "complex", "scaled"],
    )  # fmt: skip
    def test_spellings(
        self, small_graph: Make, rotation: Callable[..., Any], interleaved: bool, scaling: float
    ) -> None:
        graph = self.graph(small_graph, lambda m, x, cos, sin: rotation(x, cos, sin))
        assert graph.apply(fuse_rope) == 1
        (node,) = graph.graph.nodes(torch.ops.tapeout.rope.default)
        assert node.args[2] is interleaved
        (made,) = graph.graph.nodes(torch.ops.tapeout.rope_table.default)
        assert made.args[2] == pytest.approx(scaling)
        torch.testing.assert_close(graph.run(), graph.expected(), atol=1e-5, rtol=1e-5)

    def test_cosines_and_sines_of_different_frequencies(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            cos, sin = table(positions, m.inv_freq)[0], table(positions, m.other)[1]
            heads = (x * m.w).view(1, -1, 2, 4).transpose(1, 2)
            q, k = rotate(heads, cos, sin).transpose(1, 2), heads.transpose(1, 2)
            return attention(q, k, k, positions)

        module = Lines(lines, INV_FREQ | {"other": torch.tensor([1.0, 0.5])}, w=(HIDDEN,))
        unchanged(small_graph(module, x=randn(1, T, HIDDEN), positions=torch.arange(T)[None]), fuse_rope)


def qkv(m: Any, x: torch.Tensor, positions: torch.Tensor, **other: Any) -> torch.Tensor:
    q = F.linear(other.get("query_input", x), m.q, getattr(m, "q_bias", None))
    k = F.linear(x, m.k, getattr(m, "k_bias", None))
    v = F.linear(x, m.v, getattr(m, "v_bias", None))
    q, k, v = q.view(1, -1, HEADS, 4), k.view(1, -1, KV_HEADS, 4), v.view(1, -1, KV_HEADS, 4)
    if other.get("rope"):
        cos, sin = table(positions, m.inv_freq)
        q, k = (rotate(t.transpose(1, 2), cos, sin).transpose(1, 2) for t in (q, k))
    return attention(q, k, v, positions)


QKV = {"q": (8, HIDDEN), "k": (4, HIDDEN), "v": (4, HIDDEN)}
BIASES = {"q_bias": (8,), "k_bias": (4,), "v_bias": (4,)}


class TestMergeQkv:
    def graph(self, make: Make, function: Callable[..., Any], **shapes: tuple[int, ...]) -> Any:
        module = Lines(function, INV_FREQ, **shapes)
        return make(module, x=randn(1, T, HIDDEN), positions=torch.arange(T)[None])

    def test_before_and_after(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, qkv, **QKV, **BIASES)
        before = "aten.linear*3 aten.view*3 tapeout.attention"
        check(graph, merge_qkv, 1, before, "aten.linear aten.slice*3 aten.view*3 tapeout.attention")
        weights = {name: (ref.text(), ref.shape) for name, ref in graph.graph.weights.items()}
        assert weights == {
            ".qkv_proj.q": ("concat(q, k, v; dim=0)", (16, HIDDEN)),
            ".qkv_proj.q_bias": ("concat(q_bias, k_bias, v_bias; dim=0)", (16,)),
        }

    def test_one_rotation_covers_query_and_key(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, lambda m, x, positions: qkv(m, x, positions, rope=True), **QKV)
        assert graph.apply(fuse_rope) == 2
        assert graph.apply(merge_qkv) == 1
        assert graph.ops()["tapeout.rope.default"] == 1
        torch.testing.assert_close(graph.run(), graph.expected(), atol=1e-5, rtol=1e-5)

    def test_other_readers_of_a_projection_get_its_columns(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return qkv(m, x, positions).flatten(2) * F.linear(x, m.q)

        graph = self.graph(small_graph, lines, **QKV)
        assert graph.apply(merge_qkv) == 1
        torch.testing.assert_close(graph.run(), graph.expected(), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(
        ("function", "shapes"),
        [
            (lambda m, x, positions: qkv(m, x, positions, query_input=x * 2), QKV),  # different inputs
            (qkv, QKV | {"q_bias": (8,)}),  # a bias here and none there
        ],
    )
    def test_near_misses(
        self, small_graph: Make, function: Callable[..., Any], shapes: dict[str, Any]
    ) -> None:
        unchanged(self.graph(small_graph, function, **shapes), merge_qkv)

    def test_one_projection_for_all_is_merged_already(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            both = F.linear(x, m.q).view(1, -1, HEADS, 4)
            return attention(both, both, both, positions)

        unchanged(self.graph(small_graph, lines, q=(8, HIDDEN)), merge_qkv)


class TestPageAttention:
    def graph(self, make: Make, *layers: tuple[int, int], k_and_v: bool = True) -> Any:
        """Attention calls over (kv heads, head dim); values are one narrower without `k_and_v`."""

        def lines(m: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            y = x * m.w
            for index, (heads, dim) in enumerate(layers):
                q, k = y.view(1, -1, HIDDEN // dim, dim), y[..., : heads * dim].view(1, -1, heads, dim)
                v = k if k_and_v else k[..., :-1]
                y = torch.ops.tapeout.attention(
                    q, k, v, positions, None, None, index, 0.5, 3, 0.0, False
                ).flatten(2)
            return y

        return make(Lines(lines, w=(HIDDEN,)), x=randn(1, T, HIDDEN), positions=torch.arange(T)[None])

    def test_before_and_after(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, (1, 4))
        assert graph.apply(page_attention) == 1
        assert graph.ops()["tapeout.paged_attention.default"] == 1
        assert graph.ops()["tapeout.attention.default"] == 0
        inputs = [n.name for n in graph.graph.graph.find_nodes(op="placeholder") if "weight" not in n.meta]
        assert inputs == ["x", "positions", "kv_pool", "page_table", "cu_q", "kv_lens"]
        graph.inputs |= {
            "kv_pool": torch.full((3, 1, 2, 1, 4, 4), torch.nan),
            "page_table": torch.tensor([[2, 0]], dtype=torch.int32),
            "cu_q": torch.tensor([0, T], dtype=torch.int32),
            "kv_lens": torch.tensor([T], dtype=torch.int32),
        }
        got = graph.run()
        graph.inputs = {"x": graph.inputs["x"], "positions": graph.inputs["positions"]}
        torch.testing.assert_close(got, graph.expected())

    def test_layers_of_different_shapes_are_refused_together(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, (1, 4), (2, 4), (1, 4))
        with pytest.raises(UnsupportedError) as caught:
            graph.apply(page_attention)
        assert "keys [1, 4], values [1, 4] in layers [0, 2]" in caught.value.message
        assert "keys [2, 4], values [2, 4] in layers [1]" in caught.value.message
