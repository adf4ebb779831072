"""Each pass on a graph of a few lines: ops before and after, equal results, near misses left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tapeout.compiler.graph import Graph
from tapeout.compiler.passes.canonicalize import canonicalize
from tapeout.compiler.passes.fold_scalars import fold_scalars
from tapeout.compiler.passes.fuse_add_rms_norm import fuse_add_rms_norm
from tapeout.compiler.passes.fuse_gated_mlp import fuse_gated_mlp
from tapeout.compiler.passes.fuse_rms_norm import fuse_rms_norm
from tapeout.compiler.passes.fuse_rope import fuse_rope
from tapeout.compiler.passes.merge_qkv import merge_qkv
from tapeout.compiler.passes.page_attention import page_attention
from tapeout.compiler.passes.quantize_linears import quantize_linears
from tapeout.compiler.passes.select_logit_rows import select_logit_rows
from tapeout.compiler.pipeline import run_passes
from tapeout.plugins.errors import UnsupportedError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, T = 8, 2, 1, 4, 5
Make = Callable[..., Any]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Lines(nn.Module):
    """A module whose forward is a function of itself and its inputs, with random parameters and buffers."""

    def __init__(
        self,
        function: Callable[..., Any],
        buffers: dict[str, torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        **shapes: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.function = function
        for seed, (name, shape) in enumerate(shapes.items(), start=1):
            setattr(self, name, nn.Parameter(randn(*shape, seed=seed, dtype=dtype)))
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value, persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        row_ids: torch.Tensor | None = None,
    ) -> Any:
        optional = {"y": y, "positions": positions, "row_ids": row_ids}
        return self.function(self, x, **{k: v for k, v in optional.items() if v is not None})


def check(graph: Any, pass_: Callable[[Graph], int], count: int, before: str, after: str) -> None:
    """The pass matches `count` places, turns ops `before` into `after`, and changes no result."""

    def short(counter: Counter[str]) -> str:
        found = {
            k.removesuffix(".default").removesuffix(".Tensor").removesuffix(".int"): v
            for k, v in counter.items()
        }
        return " ".join(f"{k}*{v}" if v > 1 else k for k, v in sorted(found.items()))

    assert short(graph.ops()) == before
    assert graph.apply(pass_) == count
    assert short(graph.ops()) == after
    torch.testing.assert_close(graph.run(), graph.expected(), atol=2e-5, rtol=2e-5)


def unchanged(graph: Any, pass_: Callable[[Graph], int]) -> None:
    """A near miss: no match, the same ops, and still the right result."""
    before = graph.ops()
    assert graph.apply(pass_) == 0
    assert graph.ops() == before
    torch.testing.assert_close(graph.run(), graph.expected(), atol=2e-5, rtol=2e-5)


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


def norm(x: torch.Tensor, weight: torch.Tensor, dim: int = -1, eps: float = 1e-5) -> torch.Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(dim, keepdim=True) + eps)
    return weight * y.to(x.dtype)


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
            lambda m, x: norm(x, m.w + 1),  # no weight, a value
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
    return torch.ops.tapeout.attention(q, k, v, positions, None, 0, 0.5, 0, 0.0)


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
        graph = self.graph(small_graph, lambda m, x, cos, sin: rotate(x, cos, sin) + rotate(-x, cos, sin) * 2)
        assert graph.apply(fuse_rope) == 2
        assert graph.ops()["tapeout.rope_table.default"] == 1
        torch.testing.assert_close(graph.run(), graph.expected())

    @pytest.mark.parametrize(
        "rotation",
        [
            # the halves are not swapped, a quarter is
            lambda m, x, c, s: x * c + torch.cat((-x[..., 3:], x[..., :3]), -1) * s,
            # the sign is on the other half
            lambda m, x, c, s: x * c + torch.cat((x[..., 2:], -x[..., :2]), -1) * s,
            # interleaved pairs
            lambda m, x, c, s: x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s,
            # a cosine that is none
            lambda m, x, c, s: rotate(x, c * 2, s),
        ],
    )
    def test_near_misses(self, small_graph: Make, rotation: Callable[..., Any]) -> None:
        graph = self.graph(small_graph, rotation)
        unchanged(graph, fuse_rope)

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


class TestPageAttention:
    def graph(self, make: Make, *layers: tuple[int, int], k_and_v: bool = True) -> Any:
        """Attention calls over (kv heads, head dim); values are one narrower without `k_and_v`."""

        def lines(m: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            y = x * m.w
            for index, (heads, dim) in enumerate(layers):
                q, k = y.view(1, -1, HIDDEN // dim, dim), y[..., : heads * dim].view(1, -1, heads, dim)
                v = k if k_and_v else k[..., :-1]
                y = torch.ops.tapeout.attention(q, k, v, positions, None, index, 0.5, 3, 0.0).flatten(2)
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


class TestDriver:
    def test_a_wrong_count_names_pass_and_both_numbers(self, small_graph: Make) -> None:
        graph = small_graph(Lines(lambda m, x: norm(x, m.w), w=(HIDDEN,)), x=randn(1, T, HIDDEN))
        with pytest.raises(UnsupportedError) as caught:
            run_passes(graph.graph, (fuse_rms_norm,), {"fuse_rms_norm": 2})
        assert caught.value.message == "pass fuse_rms_norm matched 1 places, the model's config says 2"
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
