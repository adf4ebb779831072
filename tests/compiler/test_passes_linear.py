"""Gated MLP, logit rows, int8: ops before and after, equal results, near misses left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_graph import HIDDEN, Lines, Make, T, check, randn, unchanged

from tapeout.compiler.passes.fuse_gated_mlp import fuse_gated_mlp
from tapeout.compiler.passes.quantize_linears import quantize_linears
from tapeout.compiler.passes.select_logit_rows import select_logit_rows


def mlp(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, m.gate)) * F.linear(x, m.up)


MLP = {"gate": (6, HIDDEN), "up": (6, HIDDEN)}


class TestFuseGatedMlp:
    @pytest.mark.parametrize(
        ("function", "activation"),
        [
            (mlp, "silu"),
            (lambda m, x: F.linear(x, m.up) * F.gelu(F.linear(x, m.gate)), "gelu"),
            (lambda m, x: F.gelu(F.linear(x, m.gate), approximate="tanh") * F.linear(x, m.up), "gelu_tanh"),
            (lambda m, x: F.linear(x, m.up) * torch.relu(F.linear(x, m.gate)), "relu"),
        ],
    )
    def test_before_and_after(self, small_graph: Make, function: Callable[..., Any], activation: str) -> None:
        graph = small_graph(Lines(function, **MLP), x=randn(1, T, HIDDEN))
        assert graph.ops()["aten.linear.default"] == 2
        assert graph.apply(fuse_gated_mlp) == 1
        assert graph.ops() == {"aten.linear.default": 1, "tapeout.gated_activation.default": 1}
        (node,) = graph.graph.nodes(torch.ops.tapeout.gated_activation.default)
        assert node.args[1] == activation
        assert [r.text() for r in graph.graph.weights.values()] == ["concat(gate, up; dim=0)"]
        torch.testing.assert_close(graph.run(), graph.expected(), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x: F.silu(F.linear(x, m.gate)) * F.linear(x * 2, m.up),  # different inputs
            lambda m, x: F.silu(F.linear(x, m.gate)) + F.linear(x, m.up),  # no product
            lambda m, x: F.softplus(F.linear(x, m.gate)) * F.linear(x, m.up),  # no known activation
            lambda m, x: F.silu(F.linear(x, m.gate)) * x[..., :6],  # gated by no linear
        ],
    )
    def test_near_misses(self, small_graph: Make, function: Callable[..., Any]) -> None:
        unchanged(small_graph(Lines(function, **MLP), x=randn(1, T, HIDDEN)), fuse_gated_mlp)

    @pytest.mark.parametrize("shared", ["gate", "up", "activation"])
    def test_a_part_somebody_else_reads_is_not_merged(self, small_graph: Make, shared: str) -> None:
        def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
            parts = {"gate": F.linear(x, m.gate), "up": F.linear(x, m.up)}
            parts["activation"] = F.silu(parts["gate"])
            return parts["activation"] * parts["up"] + parts[shared]

        unchanged(small_graph(Lines(lines, **MLP), x=randn(1, T, HIDDEN)), fuse_gated_mlp)


class TestSelectLogitRows:
    def graph(self, make: Make, function: Callable[..., Any]) -> Any:
        inputs = {"x": randn(1, T, HIDDEN), "row_ids": torch.tensor([4, 0, 2])}
        return make(Lines(function, w=(HIDDEN,)), **inputs, rows=("row_ids",))

    def test_before_and_after(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, lambda m, x, row_ids: (x * m.w)[:, row_ids, :])
        before = "aten.index aten.mul"
        check(graph, select_logit_rows, 1, before, "aten.mul tapeout.select_rows")

    def test_other_indexing_stays(self, small_graph: Make) -> None:
        function = lambda m, x, row_ids: x * m.w[row_ids.sum() * 0 + 1]  # noqa: E731
        unchanged(self.graph(small_graph, function), select_logit_rows)


class TestQuantizeLinears:
    def test_before_and_after(self, small_graph: Make) -> None:
        module = Lines(lambda m, x: F.linear(F.linear(x, m.a, m.b), m.a), a=(HIDDEN, HIDDEN), b=(HIDDEN,))
        graph = small_graph(module, x=randn(1, T, HIDDEN))
        assert graph.apply(quantize_linears) == 2
        assert graph.ops() == {"tapeout.linear_int8.default": 2}
        # Two users of one weight share its values and scales; the bias stays as it is.
        assert {n: (r.dtype, r.shape) for n, r in graph.graph.weights.items()} == {
            "b": ("float32", (HIDDEN,)),
            "a.int8": ("int8", (HIDDEN, HIDDEN)),
            "a.scale": ("float32", (HIDDEN,)),
        }
        error = (graph.run() - graph.expected()).abs().max() / graph.expected().abs().max()
        assert 0 < error < 0.05  # int8 with a scale a row: about one percent

    def test_a_product_of_two_activations_stays(self, small_graph: Make) -> None:
        module = Lines(lambda m, x: F.linear(x, m.a * 2), a=(HIDDEN, HIDDEN))
        unchanged(small_graph(module, x=randn(1, T, HIDDEN)), quantize_linears)
