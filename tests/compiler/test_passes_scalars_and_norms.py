"""Canonicalize, folding scalars, RMSNorm: ops before and after, equal results, near misses left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_graph import HIDDEN, Lines, Make, T, check, norm, randn, unchanged

from tapeout.compiler.passes.canonicalize import canonicalize
from tapeout.compiler.passes.fold_scalars import fold_scalars
from tapeout.compiler.passes.fuse_add_rms_norm import fuse_add_rms_norm
from tapeout.compiler.passes.fuse_rms_norm import fuse_rms_norm
from tapeout.compiler.passes.join_head_norms import join_head_norms


class TestCanonicalize:
    """`small_graph` canonicalizes what it exports, so the graph found is the graph after."""

    def kept(self, make: Make, function: Callable[..., Any]) -> Counter[str]:
        graph = make(Lines(function, w=(HIDDEN,)), x=randn(1, T, HIDDEN))
        torch.testing.assert_close(graph.run(), graph.expected())
        assert canonicalize(graph.graph) == 0
        ops: Counter[str] = graph.ops()
        return ops

    def test_what_changes_nothing_goes(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.to(torch.float32).contiguous()[:, :, :]
            y = F.dropout(y.transpose(1, 2).transpose(-1, -2), 0.5, training=False)
            y = y.reshape(1, -1, 2, 4).view(1, -1, 8).expand(1, -1, 8)
            return y * m.w

        assert self.kept(small_graph, lines) == {"aten.mul.Tensor": 1}

    def test_every_second_column_stays(self, small_graph: Make) -> None:
        """Interleaved RoPE: a slice of everything with step 2 is no full slice."""
        ops = self.kept(small_graph, lambda m, x: x[..., ::2] * m.w[:4] + x[..., 1::2])
        assert ops["aten.slice.Tensor"] == 3

    @pytest.mark.parametrize(
        ("name", "function"),
        [
            ("aten.slice.Tensor", lambda m, x: x[:, :, 1:] * m.w[:7]),
            ("aten.slice.Tensor", lambda m, x: x[:, :, :7] * m.w[:7]),
            ("aten.to.dtype", lambda m, x: (x * m.w).to(torch.bfloat16).float()),
            ("aten.transpose.int", lambda m, x: (x * m.w).view(1, -1, 2, 4).transpose(1, 2).transpose(2, 3)),
        ],
    )
    def test_what_changes_something_stays(
        self, small_graph: Make, name: str, function: Callable[..., Any]
    ) -> None:
        assert self.kept(small_graph, function)[name] == 2


class TestFoldScalars:
    def test_a_constant_behind_a_cast(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
            return x * m.scale.to(x.dtype)

        module = Lines(lines, {"scale": torch.tensor(3.14159274)}, w=(HIDDEN,))
        graph = small_graph(module, x=randn(1, T, HIDDEN, dtype=torch.bfloat16))
        assert graph.apply(fold_scalars) == 1
        assert graph.ops() == {"aten.mul.Tensor": 1}
        assert not graph.graph.weights
        (node,) = graph.graph.nodes(torch.ops.aten.mul.Tensor)
        assert node.args[1] == 3.140625  # as rounded by the cast
        torch.testing.assert_close(graph.run(), graph.expected(), atol=0, rtol=0)

    def test_a_trained_scalar_stays_a_weight(self, small_graph: Make) -> None:
        unchanged(small_graph(Lines(lambda m, x: x * m.w, w=()), x=randn(1, T, HIDDEN)), fold_scalars)

    def test_a_vector_stays(self, small_graph: Make) -> None:
        module = Lines(lambda m, x: x * m.scale.to(x.device), {"scale": torch.ones(HIDDEN)})
        unchanged(small_graph(module, x=randn(1, T, HIDDEN)), fold_scalars)


def gemma_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())).type_as(x)


def olmo_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (weight * y).to(x.dtype)


class TestFuseRmsNorm:
    def test_before_and_after(self, small_graph: Make) -> None:
        graph = small_graph(Lines(lambda m, x: norm(x, m.w, eps=3e-4), w=(HIDDEN,)), x=randn(1, T, HIDDEN))
        before = "aten.add aten.mean.dim aten.mul*2 aten.pow.Tensor_Scalar aten.rsqrt"
        check(graph, fuse_rms_norm, 1, before, "tapeout.rms_norm")
        (node,) = graph.graph.nodes(torch.ops.tapeout.rms_norm.default)
        assert node.args[2:] == (3e-4, 0.0, True)

    @pytest.mark.parametrize(
        ("function", "offset", "cast_first"),
        [(norm, 0.0, True), (olmo_norm, 0.0, False), (gemma_norm, 1.0, False)],
    )
    def test_bfloat16_spellings_keep_their_rounding(
        self, small_graph: Make, function: Callable[..., Any], offset: float, cast_first: bool
    ) -> None:
        module = Lines(lambda m, x: function(x, m.w), dtype=torch.bfloat16, w=(HIDDEN,))
        graph = small_graph(module, x=randn(1, T, HIDDEN, dtype=torch.bfloat16))
        assert graph.apply(fuse_rms_norm) == 1
        (node,) = graph.graph.nodes(torch.ops.tapeout.rms_norm.default)
        assert node.args[3:] == (offset, cast_first)
        torch.testing.assert_close(graph.run(), graph.expected(), atol=0, rtol=0)

    def test_one_more_than_the_weight_is_an_offset(self, small_graph: Make) -> None:
        graph = small_graph(Lines(lambda m, x: norm(x, m.w + 1), w=(HIDDEN,)), x=randn(1, T, HIDDEN))
        assert graph.apply(fuse_rms_norm) == 1
        (node,) = graph.graph.nodes(torch.ops.tapeout.rms_norm.default)
        assert node.args[3] == 1.0
        torch.testing.assert_close(graph.run(), graph.expected())

    def test_without_a_weight(self, small_graph: Make) -> None:
        """What follows is not the norm's weight but a value: it stays a product."""
        graph = small_graph(Lines(lambda m, x: norm(x, m.w.exp()), w=(HIDDEN,)), x=randn(1, T, HIDDEN))
        assert graph.apply(fuse_rms_norm) == 1
        assert graph.ops() == {"aten.exp.default": 1, "aten.mul.Tensor": 1, "tapeout.rms_norm.default": 1}
        (node,) = graph.graph.nodes(torch.ops.tapeout.rms_norm.default)
        assert graph.graph.constants[graph.graph.weight_name(node.args[1])].tolist() == [1.0] * HIDDEN
        torch.testing.assert_close(graph.run(), graph.expected())

    def test_a_norm_of_heads_moves_in_front_of_their_transpose(self, small_graph: Make) -> None:
        module = Lines(lambda m, x: norm(x.view(1, -1, 2, 4).transpose(1, 2), m.w), w=(4,))
        graph = small_graph(module, x=randn(1, T, HIDDEN))
        assert graph.apply(fuse_rms_norm) == 1
        (node,) = graph.graph.nodes(torch.ops.tapeout.rms_norm.default)
        assert node.args[0].target is torch.ops.aten.view.default
        torch.testing.assert_close(graph.run(), graph.expected())

    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x: norm(x, m.w, dim=-2),  # another reduction
            lambda m, x: m.w * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()),  # not the inverse root
            lambda m, x: m.w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5)),  # another power
            lambda m, x: (
                m.w * (x * torch.rsqrt((x * 2).pow(2).mean(-1, keepdim=True) + 1e-5))
            ),  # of another x
        ],
    )
    def test_near_misses(self, small_graph: Make, function: Callable[..., Any]) -> None:
        unchanged(small_graph(Lines(function, w=(HIDDEN,)), x=randn(1, T, HIDDEN)), fuse_rms_norm)


class TestFuseAddRmsNorm:
    def graph(self, make: Make, function: Callable[..., Any]) -> Any:
        graph = make(Lines(function, w=(HIDDEN,)), x=randn(1, T, HIDDEN), y=randn(1, T, HIDDEN, seed=9))
        assert graph.apply(fuse_rms_norm) == 1
        return graph

    def test_before_and_after(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            total = x + y
            return norm(total, m.w) * total

        graph = self.graph(small_graph, lines)
        before = "aten.add aten.mul tapeout.rms_norm"
        check(graph, fuse_add_rms_norm, 1, before, "aten.mul getitem*2 tapeout.add_rms_norm")

    def test_the_sum_may_be_read_before_the_norm(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            total = x + y
            early = total * 2
            return early * norm(total, m.w)

        graph = self.graph(small_graph, lines)
        assert graph.apply(fuse_add_rms_norm) == 1
        torch.testing.assert_close(graph.run(), graph.expected())

    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x, y: norm(x + 1.0, m.w) * y,
            lambda m, x, y: norm(x + m.w, m.w) * y,  # broadcasts
            lambda m, x, y: norm(torch.add(x, y, alpha=2), m.w),
            lambda m, x, y: norm(x * y, m.w),
        ],
    )
    def test_near_misses(self, small_graph: Make, function: Callable[..., Any]) -> None:
        unchanged(self.graph(small_graph, function), fuse_add_rms_norm)


class TestJoinHeadNorms:
    """StableLM 2: every head has a LayerNorm with a weight of its own."""

    SIZE = HIDDEN // 2

    def graph(self, make: Make, order: tuple[int, int], eps: tuple[float, float]) -> Any:
        def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
            heads = torch.split(x.view(1, -1, 2, self.SIZE).transpose(1, 2), 1, dim=1)
            weights = (m.a, m.b)
            normed = [
                F.layer_norm(heads[i], (self.SIZE,), w, None, e)
                for i, w, e in zip(order, weights, eps, strict=True)
            ]
            return torch.cat(normed, dim=1)

        return make(Lines(lines, a=(self.SIZE,), b=(self.SIZE,)), x=randn(1, T, HIDDEN))

    def test_norms_of_all_heads_become_one(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, (0, 1), (1e-5, 1e-5))
        assert graph.ops()["aten.layer_norm.default"] == 2
        assert graph.apply(join_head_norms) == 1
        ops = graph.ops()
        assert (ops["aten.layer_norm.default"], ops["aten.mul.Tensor"], ops["aten.cat.default"]) == (1, 1, 0)
        torch.testing.assert_close(graph.run(), graph.expected(), atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize(("order", "eps"), [((1, 0), (1e-5, 1e-5)), ((0, 1), (1e-5, 1e-3))])
    def test_heads_in_another_order_or_with_another_epsilon_stay(
        self, small_graph: Make, order: tuple[int, int], eps: tuple[float, float]
    ) -> None:
        unchanged(self.graph(small_graph, order, eps), join_head_norms)
