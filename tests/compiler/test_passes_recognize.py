"""What is recognized by running it: written-out attention, activations, routers, weights made on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_graph import HIDDEN, Lines, Make, T, check, randn, unchanged

from tapeout.compiler.passes.fold_weights import fold_weights
from tapeout.compiler.passes.recognize_activations import recognize_activations
from tapeout.compiler.passes.recognize_attention import recognize_attention
from tapeout.compiler.passes.recognize_linears import recognize_linears
from tapeout.compiler.passes.recognize_routers import recognize_routers
from tapeout.plugins.errors import UnsupportedError

SLOPES = torch.tensor([0.5, 0.25])


def scores(
    m: Any, x: torch.Tensor, positions: torch.Tensor, change: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Attention of two heads as a model writes it out; `change(scores, query and key positions)`."""
    heads = (x * m.w).view(1, -1, 2, HIDDEN // 2).transpose(1, 2)
    product = heads @ heads.transpose(-1, -2)
    rows = torch.arange(x.shape[1])
    weights = F.softmax(change(product, rows[:, None], rows[None]), dim=-1)
    return (weights @ heads).transpose(1, 2).flatten(2)


def causal(product: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return product.masked_fill(k > q, torch.finfo(torch.float32).min)


class TestAttention:
    def graph(self, make: Make, change: Callable[..., torch.Tensor]) -> Any:
        module = Lines(lambda m, x, positions: scores(m, x, positions, change), w=(HIDDEN,))
        return make(module, x=randn(1, T, HIDDEN), positions=torch.arange(T)[None])

    @pytest.mark.parametrize(
        ("change", "scale", "window", "slopes"),
        [
            (lambda s, q, k: causal(s * 0.5, q, k), 0.5, 0, None),
            (lambda s, q, k: causal(s / math.sqrt(8), q, k), 8**-0.5, 0, None),
            (lambda s, q, k: causal(s, q, k).masked_fill(q - k >= 3, -1e38), 1.0, 3, None),
            (lambda s, q, k: causal(s * 0.5 + k * SLOPES[:, None, None], q, k), 0.5, 0, [0.5, 0.25]),
            (
                lambda s, q, k: causal((s + (k - q) * SLOPES[:, None, None]) * 0.5, q, k),
                0.5,
                0,
                [0.25, 0.125],
            ),
        ],
        ids=["scale", "square root", "window", "ALiBi", "ALiBi of distances, scaled"],
    )
    def test_before_and_after(
        self, small_graph: Make, change: Any, scale: float, window: int, slopes: list[float] | None
    ) -> None:
        graph = self.graph(small_graph, change)
        assert graph.apply(recognize_attention) == 1
        assert graph.ops()["aten.softmax.int"] == 0
        (node,) = graph.graph.nodes(torch.ops.tapeout.attention.default)
        assert node.args[7:] == (scale, window, 0.0, slopes is not None)
        found = graph.graph.weight_name(node.args[4])
        assert (None if found is None else graph.graph.constants[found].tolist()) == slopes
        torch.testing.assert_close(graph.run(), graph.expected(), atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            (lambda s, q, k: s, "neither causal nor a sliding window"),
            (
                lambda s, q, k: causal(s, q, k).masked_fill(k == 2, -1e38),
                "neither causal nor a sliding window",
            ),
            (lambda s, q, k: causal(s + (q - k).float() ** 2, q, k), "not linear in the distance"),
            (lambda s, q, k: causal(s * (1.0 + k), q, k), "something else than a number"),
        ],
    )
    def test_refused(self, small_graph: Make, change: Any, what: str) -> None:
        with pytest.raises(UnsupportedError, match=what):
            self.graph(small_graph, change).apply(recognize_attention)


class TestActivations:
    @pytest.mark.parametrize(
        ("function", "kind"),
        [
            (
                lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3)))),
                "gelu_tanh",
            ),
            (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
            (lambda x: torch.relu(x).square(), "relu2"),
            (lambda x: x * torch.sigmoid(1.702 * x), "quick_gelu"),
            (lambda x: x * torch.sigmoid(x), "silu"),
        ],
    )
    def test_written_out(self, small_graph: Make, function: Callable[..., torch.Tensor], kind: str) -> None:
        graph = small_graph(Lines(lambda m, x: F.linear(function(F.linear(x, m.w)), m.w), w=(HIDDEN, HIDDEN)),
                            x=randn(1, T, HIDDEN))  # fmt: skip
        assert graph.apply(recognize_activations) == 1
        (node,) = graph.graph.nodes(torch.ops.tapeout.activation.default)
        assert node.args[1] == kind
        torch.testing.assert_close(graph.run(), graph.expected(), atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize("function", [torch.relu, lambda x: x * torch.sigmoid(1.5 * x), lambda x: 2 * x])
    def test_near_misses(self, small_graph: Make, function: Callable[..., torch.Tensor]) -> None:
        unchanged(small_graph(Lines(lambda m, x: function(x * m.w), w=(HIDDEN,)), x=randn(1, T, HIDDEN)),
                  recognize_activations)  # fmt: skip


def route(m: Any, x: torch.Tensor, choose: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    ids, weights = choose(F.linear(x[0], m.router))
    out: torch.Tensor = torch.ops.tapeout.moe_experts(
        x[0], ids, weights, m.up, m.down, None, None, "silu", False, False, 0.0, 0.0
    )
    return out[None]


def after_softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.topk(F.softmax(logits, dim=-1), 2, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True)


def of_logits(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.topk(logits, 2, dim=-1)
    return ids, F.softmax(weights, dim=-1) * 2.5


class TestRouters:
    def graph(self, make: Make, choose: Callable[..., Any]) -> Any:
        shapes = {"router": (6, HIDDEN), "up": (6, 16, HIDDEN), "down": (6, HIDDEN, 16)}
        return make(Lines(lambda m, x: route(m, x, choose), **shapes), x=randn(1, T, HIDDEN))

    @pytest.mark.parametrize(
        ("choose", "scoring", "normalize", "scale"),
        [(after_softmax, "softmax", True, 1.0), (of_logits, "softmax", True, 2.5)],
    )
    def test_before_and_after(
        self, small_graph: Make, choose: Any, scoring: str, normalize: bool, scale: float
    ) -> None:
        graph = self.graph(small_graph, choose)
        assert graph.apply(recognize_routers) == 1
        (node,) = graph.graph.nodes(torch.ops.tapeout.moe_router.default)
        assert node.args[2:] == (2, scoring, 1, 1, "best", normalize, scale)
        torch.testing.assert_close(graph.run(), graph.expected(), atol=2e-5, rtol=2e-5)

    def test_another_routing_is_refused(self, small_graph: Make) -> None:
        def squared(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = torch.topk(F.softmax(logits, dim=-1), 2, dim=-1)
            return ids, weights * weights

        with pytest.raises(UnsupportedError, match="none that moe_router knows"):
            self.graph(small_graph, squared).apply(recognize_routers)


def test_weights_made_on_the_way_become_recipes(small_graph: Make) -> None:
    def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, torch.cat((m.a.t()[:HIDDEN, ::2], m.a.t()[:HIDDEN, 1::2]), dim=1)) * (m.b + 1.0)

    graph = small_graph(Lines(lines, a=(HIDDEN, HIDDEN), b=(HIDDEN,)), x=randn(1, T, HIDDEN))
    assert graph.apply(fold_weights) >= 4
    assert graph.ops() == {"aten.linear.default": 1, "aten.mul.Tensor": 1}
    texts = {ref.text() for ref in graph.graph.weights.values()}
    assert "add(b; value=1.0)" in texts
    torch.testing.assert_close(graph.run(), graph.expected(), atol=2e-5, rtol=2e-5)


def test_products_with_weights_in_other_spellings(small_graph: Make) -> None:
    def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(m.bias, (x @ m.a)[0], m.a)[None]

    graph = small_graph(Lines(lines, a=(HIDDEN, HIDDEN), bias=(HIDDEN,)), x=randn(1, T, HIDDEN))
    before = " ".join(sorted(graph.ops()))
    assert "addmm" in before
    assert graph.apply(recognize_linears) == 2
    assert graph.ops()["aten.linear.default"] == 2
    assert {ref.text() for ref in graph.graph.weights.values()} == {"transpose(a)", "bias"}
    torch.testing.assert_close(graph.run(), graph.expected(), atol=2e-5, rtol=2e-5)


def test_a_table_read_from_an_offset_on(small_graph: Make) -> None:
    module = Lines(lambda m, x, positions: x + F.embedding(positions + 2, m.table), table=(T + 2, HIDDEN))
    graph = small_graph(module, x=randn(1, T, HIDDEN), positions=torch.arange(T)[None])
    check(graph, recognize_linears, 1, "aten.add*2 aten.embedding", "aten.add aten.embedding")
    assert [ref.text() for ref in graph.graph.weights.values()] == [
        f"slice(table; dim=0, start=2, stop={T + 2})"
    ]
