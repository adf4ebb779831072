"""Passes for GPUs alone: ops before and after, equal results, near misses left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_graph import HIDDEN, Lines, Make, T, check, randn, unchanged

from tapeout.compiler.graph import Graph
from tapeout.compiler.passes.fuse_add_rms_norm import fuse_add_rms_norm
from tapeout.compiler.passes.fuse_linear_add import fuse_linear_add
from tapeout.compiler.passes.fuse_norm_linear import fuse_norm_linear
from tapeout.compiler.passes.fuse_rope_attention import fuse_rope_attention
from tapeout.compiler.passes.page_attention import page_attention
from tapeout.compiler.passes.select_logit_rows import select_logit_rows
from tapeout.compiler.passes.select_rows_early import select_rows_early

ops = torch.ops.tapeout
DIM = 4
ROWS = {"row_ids": torch.tensor([3, 1])}


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return ops.rms_norm(x, weight, eps, 1.0, False)


class Turned:
    """What the attention of `TestFuseRopeAttention` may be made of: heads, tables, rotations."""

    def __init__(self, m: Any, x: torch.Tensor, positions: torch.Tensor) -> None:
        self.m = m
        self.positions = positions
        heads = (x * m.w).view(1, -1, 2, DIM)
        self.q, self.k, self.v = heads, heads[:, :, :1] * 3, heads[:, :, 1:] * 2

    def table(self, name: str = "inv_freq") -> torch.Tensor:
        inv_freq = getattr(self.m, name).to(self.positions.device)
        return ops.rope_table(self.positions, inv_freq, 1.0, "float32")

    def turn(self, x: torch.Tensor, interleaved: bool = False, table: str = "inv_freq") -> torch.Tensor:
        return ops.rope(x, self.table(table), interleaved)

    def attend(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return ops.attention(q, k, self.v, self.positions, None, None, 0, 0.5, 3, 2.0, False)


TABLES = {
    "inv_freq": torch.tensor([1.0, 0.1]),
    "other": torch.tensor([1.0, 0.2]),
    "partial": torch.tensor([1.0]),
}


def both(t: Turned) -> torch.Tensor:
    """One table, and one rotation for queries and keys, as merge_qkv leaves them."""
    turned = t.turn(torch.cat([t.q, t.k], 2) * 1.5)
    return t.attend(turned[:, :, :2], turned[:, :, 2:3])


def separate(t: Turned) -> torch.Tensor:
    table = t.table()
    return t.attend(ops.rope(t.q, table, True), ops.rope(t.k, table, True))


def normed(t: Turned, k_eps: float = 1e-5) -> torch.Tensor:
    table = t.table()
    q, k = rms(t.q, t.m.qw), rms(t.k, t.m.kw, k_eps)
    return t.attend(ops.rope(q, table, False), ops.rope(k, table, False))


def read_elsewhere(t: Turned) -> torch.Tensor:
    table = t.table()
    q = ops.rope(t.q, table, False)
    return t.attend(q, ops.rope(t.k, table, False)) * q


class TestFuseRopeAttention:
    def graph(self, make: Make, function: Callable[[Turned], torch.Tensor]) -> Any:
        def lines(m: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return function(Turned(m, x, positions))

        module = Lines(lines, TABLES, w=(HIDDEN,), qw=(DIM,), kw=(DIM,))
        graph = make(module, x=randn(1, T, HIDDEN), positions=torch.arange(T)[None])
        expected = graph.expected()
        graph.expected = lambda: expected
        assert graph.apply(page_attention) == 1
        graph.inputs |= {
            "kv_pool": torch.full((3, 1, 2, 1, 4, DIM), torch.nan),
            "page_table": torch.tensor([[2, 0]], dtype=torch.int32),
            "cu_q": torch.tensor([0, T], dtype=torch.int32),
            "kv_lens": torch.tensor([T], dtype=torch.int32),
        }
        return graph

    def fused(self, graph: Any) -> Any:
        """The one attention left after the pass, which changed no result."""
        table, before = graph.ops()["tapeout.rope_table.default"], graph.run()
        assert graph.apply(fuse_rope_attention) == 1
        assert graph.ops()["tapeout.rope_table.default"] == table == 1
        assert graph.ops()["tapeout.paged_attention.default"] == 0
        assert graph.ops()["tapeout.rope.default"] == 0
        torch.testing.assert_close(graph.run(), graph.expected())
        assert torch.equal(graph.run(), before)
        (node,) = graph.graph.nodes(ops.rope_attention.default)
        return node

    def test_before_and_after(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, separate)
        assert graph.ops()["tapeout.rope.default"] == 2
        node = self.fused(graph)
        assert node.args[4:7] == (None, None, None)
        assert node.args[11:] == (0, 0.5, 3, 2.0, True, False, 0.0, 0.0, False)

    def test_one_rotation_of_queries_and_keys_becomes_two_windows(self, small_graph: Make) -> None:
        node = self.fused(self.graph(small_graph, both))
        assert [a.args[1:] for a in node.args[:2]] == [(2, 0, 2), (2, 2, 3)]
        assert node.args[0].args[0] is node.args[1].args[0]

    def test_norms_join(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, normed)
        assert graph.ops()["tapeout.rms_norm.default"] == 2
        node = self.fused(graph)
        assert graph.ops()["tapeout.rms_norm.default"] == 0
        assert [a.meta["weight"] for a in node.args[4:6]] == ["qw", "kw"]
        assert node.args[15:] == (False, True, 1e-5, 1.0, False)

    def test_norms_that_differ_stay_in_front(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, lambda t: normed(t, k_eps=1e-3))
        node = self.fused(graph)
        assert graph.ops()["tapeout.rms_norm.default"] == 2
        assert node.args[4:7] == (None, None, None)

    @pytest.mark.parametrize(
        "function",
        [
            lambda t: t.attend(t.turn(t.q), t.k),  # keys are not rotated
            lambda t: t.attend(t.turn(t.q), t.turn(t.k, table="other")),
            lambda t: t.attend(t.turn(t.q), t.turn(t.k, interleaved=True)),
            lambda t: t.attend(t.turn(t.q, table="partial"), t.turn(t.k, table="partial")),  # half a head
            lambda t: t.attend(rms(t.turn(t.q), t.m.qw), rms(t.turn(t.k), t.m.kw)),  # normed afterwards
            read_elsewhere,
        ],
    )
    def test_near_misses(self, small_graph: Make, function: Callable[[Turned], torch.Tensor]) -> None:
        unchanged(self.graph(small_graph, function), fuse_rope_attention)


class TestSelectRowsEarly:
    def graph(self, make: Make, function: Callable[..., Any]) -> Any:
        module = Lines(function, w=(HIDDEN,), square=(HIDDEN, HIDDEN))
        graph = make(module, x=randn(1, T, HIDDEN), y=randn(1, T, HIDDEN), rows=("row_ids",), **ROWS)
        assert graph.apply(select_logit_rows) == 1
        return graph

    def test_a_norm_sees_the_selected_rows(self, small_graph: Make) -> None:
        graph = self.graph(small_graph, lambda m, x, y, row_ids: rms(x, m.w)[:, row_ids])
        same = "tapeout.rms_norm tapeout.select_rows"
        check(graph, select_rows_early, 1, same, same)
        (norm,) = graph.graph.nodes(ops.rms_norm.default)
        assert norm.args[0].target is ops.select_rows.default
        assert norm.args[2:] == (1e-5, 1.0, False)

    def test_the_rest_of_a_layer_follows_the_selection(self, small_graph: Make) -> None:
        """x stands for the attention's result, y for the residual, which earlier layers' readers keep."""

        def rest(m: Any, x: torch.Tensor, y: torch.Tensor, row_ids: torch.Tensor) -> Any:
            total = F.linear(x, m.square) + y
            return (F.linear(rms(total, m.w), m.square) + total)[:, row_ids], y * 2

        graph = self.graph(small_graph, rest)
        before = "aten.add*2 aten.linear*2 aten.mul tapeout.rms_norm tapeout.select_rows"
        check(graph, select_rows_early, 1, before, before + "*2")
        for select in graph.graph.nodes(ops.select_rows.default):
            assert select.args[0].op == "placeholder"
        (norm,) = graph.graph.nodes(ops.rms_norm.default)
        assert norm.meta["val"].shape[1] == graph.graph.nodes(ops.select_rows.default)[0].meta["val"].shape[1]

    def test_of_a_sum_that_the_attention_reads_normed_the_rows_are_selected(self, small_graph: Make) -> None:
        """add_rms_norm makes both; only the sum goes on to the rest of the layer."""

        def lines(m: Any, x: torch.Tensor, y: torch.Tensor, row_ids: torch.Tensor) -> Any:
            total = x + y
            return (F.linear(x, m.square) + total)[:, row_ids], rms(total, m.w) * 2

        graph = self.graph(small_graph, lines)
        assert graph.apply(fuse_add_rms_norm) == 1
        assert graph.apply(select_rows_early) == 1
        torch.testing.assert_close(graph.run(), graph.expected())
        sources = {select.args[0].name for select in graph.graph.nodes(ops.select_rows.default)}
        assert len(sources) == 2
        assert any(name.startswith("getitem") for name in sources)

    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x, y, row_ids: rms(x, m.w)[:, row_ids] * rms(x, m.w).sum(),  # its rows are wanted too
            lambda m, x, y, row_ids: (x + y).cumsum(1)[:, row_ids],  # a row looks at others
        ],
    )
    def test_near_misses(self, small_graph: Make, function: Callable[..., Any]) -> None:
        graph = self.graph(small_graph, function)
        norms = graph.graph.nodes(ops.rms_norm.default)
        for other in norms[1:]:  # as one norm with two readers
            other.replace_all_uses_with(norms[0])
        graph.graph.tidy()
        graph.graph.recompile()
        unchanged(graph, select_rows_early)


def project(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, m.w, getattr(m, "b", None))


class TestFuseLinearAdd:
    @pytest.mark.parametrize(
        "function", [lambda m, x, y: project(m, x) + y, lambda m, x, y: y + project(m, x)]
    )
    @pytest.mark.parametrize("bias", [{}, {"b": (HIDDEN,)}])
    def test_before_and_after(
        self, small_graph: Make, function: Callable[..., Any], bias: dict[str, tuple[int]]
    ) -> None:
        module = Lines(function, w=(HIDDEN, HIDDEN), **bias)
        graph = small_graph(module, x=randn(1, T, HIDDEN), y=randn(1, T, HIDDEN, seed=9))
        check(graph, fuse_linear_add, 1, "aten.add aten.linear", "tapeout.linear_add")
        (node,) = graph.graph.nodes(ops.linear_add.default)
        assert [a.name if a is not None else None for a in node.args] == [
            "x",
            "y",
            "w_w",
            "w_b" if bias else None,
        ]

    def test_of_two_linears_the_later_one_is_the_product(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            first = F.linear(x, m.w)
            return F.linear(y, m.v) + first

        shapes = {"w": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN)}
        graph = small_graph(Lines(lines, **shapes), x=randn(1, T, HIDDEN), y=randn(1, T, HIDDEN, seed=9))
        check(graph, fuse_linear_add, 1, "aten.add aten.linear*2", "aten.linear tapeout.linear_add")
        (node,) = graph.graph.nodes(ops.linear_add.default)
        assert node.args[0].name == "y"

    def test_a_stream_of_additions(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = x + project(m, x)
            return x

        graph = small_graph(Lines(lines, w=(HIDDEN, HIDDEN)), x=randn(1, T, HIDDEN))
        check(graph, fuse_linear_add, 3, "aten.add*3 aten.linear*3", "tapeout.linear_add*3")

    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x, y: project(m, x) + 1.0,
            lambda m, x, y: project(m, x) + y[:, :, :1],  # broadcasts
            lambda m, x, y: torch.add(y, project(m, x), alpha=2),
            lambda m, x, y: project(m, x) * 2 + y,
            lambda m, x, y: F.linear(x, m.w * 2) + y,  # of no checkpoint weight
        ],
    )
    def test_near_misses(self, small_graph: Make, function: Callable[..., Any]) -> None:
        module = Lines(function, w=(HIDDEN, HIDDEN))
        unchanged(small_graph(module, x=randn(1, T, HIDDEN), y=randn(1, T, HIDDEN, seed=9)), fuse_linear_add)

    def test_a_product_with_another_reader_stays(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
            product = project(m, x)
            return (product + x) * product

        unchanged(small_graph(Lines(lines, w=(HIDDEN, HIDDEN)), x=randn(1, T, HIDDEN)), fuse_linear_add)

    def test_a_product_added_to_itself_stays(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
            product = project(m, x)
            return product + product

        unchanged(small_graph(Lines(lines, w=(HIDDEN, HIDDEN)), x=randn(1, T, HIDDEN)), fuse_linear_add)


class TestFuseNormLinear:
    def graph(self, make: Make, function: Callable[..., Any], **shapes: tuple[int, ...]) -> Any:
        module = Lines(function, g=(HIDDEN,), w=(6, HIDDEN), **shapes)
        return make(module, x=randn(1, T, HIDDEN))

    @pytest.mark.parametrize("bias", [{}, {"b": (6,)}])
    def test_before_and_after(self, small_graph: Make, bias: dict[str, tuple[int]]) -> None:
        graph = self.graph(small_graph, lambda m, x: project(m, rms(x, m.g)), **bias)
        check(graph, fuse_norm_linear, 1, "aten.linear tapeout.rms_norm", "tapeout.norm_linear")
        (node,) = graph.graph.nodes(ops.norm_linear.default)
        names = [a.name if a is not None else None for a in node.args[:4]]
        assert names == ["x", "w_g", "w_w", "w_b" if bias else None]
        assert node.args[4:] == (1e-5, 1.0, False, "")

    def test_the_gated_activation_joins(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
            return ops.gated_activation(project(m, rms(x, m.g)), "gelu_tanh")

        graph = self.graph(small_graph, lines)
        before = "aten.linear tapeout.gated_activation tapeout.rms_norm"
        check(graph, fuse_norm_linear, 1, before, "tapeout.norm_linear")
        (node,) = graph.graph.nodes(ops.norm_linear.default)
        assert node.args[-1] == "gelu_tanh"

    def test_an_activation_of_a_product_with_another_reader_stays(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
            product = project(m, rms(x, m.g))
            return ops.gated_activation(product, "silu") * product[..., :3]

        graph = self.graph(small_graph, lines)
        assert graph.apply(fuse_norm_linear) == 1
        assert graph.ops()["tapeout.gated_activation.default"] == 1
        torch.testing.assert_close(graph.run(), graph.expected())

    def test_a_norm_with_another_reader_stays(self, small_graph: Make) -> None:
        def lines(m: Any, x: torch.Tensor) -> torch.Tensor:
            n = rms(x, m.g)
            return project(m, n) * n.sum()

        unchanged(self.graph(small_graph, lines), fuse_norm_linear)

    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x: project(m, rms(x, m.g) * 2),
            lambda m, x: project(m, rms(x, m.g * 2)),  # of no checkpoint weight
            lambda m, x: F.linear(rms(x, m.g), m.w * 2),
            lambda m, x: F.linear(rms(x.view(1, -1, 2, 4), m.h), m.hw),  # over heads
        ],
    )
    def test_near_misses(self, small_graph: Make, function: Callable[..., Any]) -> None:
        unchanged(self.graph(small_graph, function, h=(4,), hw=(6, 4)), fuse_norm_linear)


def test_attention_is_never_dead_code(small_graph: Make) -> None:
    """It writes the cache: a layer nobody reads from is still part of later steps."""

    def lines(m: Any, x: torch.Tensor, positions: torch.Tensor) -> Any:
        turned = Turned(m, x, positions)
        return x * 2, separate(turned)

    graph = small_graph(
        Lines(lines, TABLES, w=(HIDDEN,)), x=randn(1, T, HIDDEN), positions=torch.arange(T)[None]
    )
    for pass_ in (page_attention, fuse_rope_attention):
        assert graph.apply(pass_) == 1
    _drop_second_output(graph.graph)
    assert graph.ops()["tapeout.rope_attention.default"] == 1


def _drop_second_output(graph: Graph) -> None:
    (output,) = graph.graph.find_nodes(op="output")
    output.args = (output.args[0][:1],)
    graph.tidy()
    graph.recompile()
