"""Recognize attention that a model writes out: a softmax over scores of every query with every key.

Some families do not call transformers' AttentionInterface (BLOOM, MPT, Falcon, GPT-Neo). What they add to
`q @ k` before the softmax follows from positions and constants alone, so it is run on numbers, which shows
the scale, the mask and the slopes of ALiBi, however the code makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, to_numpy
from tapeout.compiler.probe import Probe, known_nodes, regions_above
from tapeout.plugins.errors import UnsupportedError

_PRODUCTS = frozenset({aten.matmul.default, aten.bmm.default})
_SOFTMAX = frozenset({aten.softmax.int, aten._softmax.default})
_THROUGH = frozenset({aten.to.dtype, aten.view.default, aten.reshape.default})
_MASK = torch.ops.tapeout.causal_mask.default
_HIDDEN = -1e30  # what a mask adds is below, what ALiBi adds is above
# Rows that scores are tried with: a window that is made of constants must be smaller. Fewer where a table
# of constants ends before.
_ROWS = (1_100, 256, 64)


@dataclass(frozen=True)
class _Scores:
    """scale * (q @ k) + slope * (key - query) per head, over a window (0: all)."""

    scale: float
    window: int
    slopes: torch.Tensor | None


def recognize_attention(graph: Graph) -> int:
    """Returns the number of softmaxes that became `tapeout::attention`.

    Raises UnsupportedError for a softmax over scores whose mask or bias is not understood.
    """
    _split_baddbmm(graph)
    _split_sdpa(graph)
    softmaxes = [n for t in _SOFTMAX for n in graph.nodes(t) if _is_over_keys(n)]
    if not softmaxes:
        return 0
    known = known_nodes(graph)
    for node in graph.graph.nodes:  # masks follow from positions, and so does what is made of them
        if node.target is _MASK or (
            node.op == "call_function"
            and node.target not in _PRODUCTS
            and known.issuperset(node.all_input_nodes)
        ):
            known.add(node)
    probes = [Probe(graph, torch.arange(rows)) for rows in _ROWS]
    for layer, softmax in enumerate(sorted(softmaxes)):
        _replace(graph, softmax, layer, known, probes)
    return len(softmaxes)


def _is_over_keys(node: fx.Node) -> bool:
    shape = node.meta["val"].shape
    return len(shape) >= 3 and not isinstance(shape[-1], int) and not isinstance(shape[-2], int)


def _split_baddbmm(graph: Graph) -> None:
    """`baddbmm` becomes the product and the sum that it is short for."""
    for node in graph.nodes(aten.baddbmm.default):
        bias, left, right = node.args
        product = graph.call(node, aten.bmm.default, left, right)
        product = graph.call(node, aten.mul.Tensor, product, float(node.kwargs.get("alpha", 1)))
        bias = graph.call(node, aten.mul.Tensor, bias, float(node.kwargs.get("beta", 1)))
        node.replace_all_uses_with(graph.call(node, aten.add.Tensor, product, bias))
        graph.graph.erase_node(node)


def _split_sdpa(graph: Graph) -> None:
    """`scaled_dot_product_attention` with a mask of numbers becomes its products and its softmax."""
    for node in graph.nodes(aten.scaled_dot_product_attention.default):
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        mask, q, k = given.get("attn_mask"), given["query"], given["key"]
        masked = mask is not None and mask.meta["val"].dtype != torch.bool
        if not masked or given.get("dropout_p") or given.get("is_causal") or given.get("enable_gqa"):
            raise _unknown(node, "calls scaled_dot_product_attention without a mask of numbers")
        scale = given.get("scale") or q.meta["val"].shape[-1] ** -0.5
        scores = graph.call(node, aten.matmul.default, q, graph.call(node, aten.transpose.int, k, -2, -1))
        scores = graph.call(node, aten.mul.Tensor, scores, float(scale))
        scores = graph.call(node, aten.add.Tensor, scores, mask)
        weights = graph.call(node, aten.softmax.int, scores, -1)
        node.replace_all_uses_with(graph.call(node, aten.matmul.default, weights, given["value"]))
        graph.graph.erase_node(node)


def _replace(graph: Graph, softmax: fx.Node, layer: int, known: set[fx.Node], probes: list[Probe]) -> None:
    regions = regions_above([softmax.args[0]], known, lambda n: n.target not in _PRODUCTS)
    products = [r.source for r in regions if r.source.target in _PRODUCTS]
    if softmax.args[0].target in _PRODUCTS:
        products = [softmax.args[0]]
    weighted = _weighted_sum(softmax)
    if not products or weighted is None:
        raise _unknown(softmax, "is not made of one product of queries with keys")
    product = products[0]
    scores = _scores(softmax, product, probes)
    q, k, v = product.args[0], product.args[1], weighted.args[1]
    slopes = None
    if scores.slopes is not None:
        slopes = graph.add_constant("alibi.slopes", to_numpy(scores.slopes))
    (positions,) = [n for n in graph.graph.find_nodes(op="placeholder") if n.name == "positions"]
    out = graph.call(
        weighted, torch.ops.tapeout.attention.default, _rows(graph, weighted, q, turned=False),
        _rows(graph, weighted, k, turned=True), _rows(graph, weighted, v, turned=False), positions,
        slopes, None, layer, scores.scale, scores.window, 0.0, slopes is not None,
    )  # fmt: skip
    out = graph.call(weighted, aten.transpose.int, out, 1, 2)
    if weighted.meta["val"].dim() == 3:
        out = graph.call(weighted, aten.squeeze.dim, out, 0)
    weighted.replace_all_uses_with(out)


def _weighted_sum(softmax: fx.Node) -> fx.Node | None:
    """The product of the probabilities with the values."""
    node = softmax
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in _PRODUCTS and user.args[0] is node:
            return user
        if user.target not in _THROUGH:
            return None
        node = user
    return None


def _rows(graph: Graph, before: fx.Node, node: fx.Node, *, turned: bool) -> fx.Node:
    """`[1, H, T, D]` or `[H, T, D]` (the last two swapped if turned) as `[1, T, H, D]`."""
    if turned:
        node = graph.call(before, aten.transpose.int, node, -1, -2)
    if node.meta["val"].dim() == 3:
        node = graph.call(before, aten.unsqueeze.default, node, 0)
    return graph.call(before, aten.transpose.int, node, 1, 2)


def _tried(softmax: fx.Node, product: fx.Node, probes: list[Probe]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The softmax's input `[H or 1, rows, rows]` for products of 0 and of 1, and the number of rows."""
    problem: Exception | None = None
    for probe in probes:
        zero = torch.zeros(probe.shape(product))
        try:
            values = (probe.value(softmax.args[0], {product: zero + i}).float() for i in range(2))
            bias, scaled = (t.reshape(-1, *t.shape[-2:]) for t in values)
        except (LookupError, RuntimeError) as error:
            problem = error
        else:
            return bias, scaled, probe.rows
    raise _unknown(softmax, f"adds something to its scores that cannot be computed ({problem})")


def _scores(softmax: fx.Node, product: fx.Node, probes: list[Probe]) -> _Scores:
    """What happens to the product."""
    bias, scaled, rows = _tried(softmax, product, probes)
    row, column = torch.arange(rows)[:, None], torch.arange(rows)[None]
    visible = bias[0] > _HIDDEN
    window = int(visible[-1].sum())
    expected = (column <= row) & (column > row - window)
    if not torch.equal(visible, expected) or not bool(((bias > _HIDDEN) == visible).all()):
        raise _unknown(softmax, "has a mask that is neither causal nor a sliding window")
    factors = (scaled - bias)[:, expected]
    scale = float(factors.mean())
    if not torch.allclose(factors, torch.full_like(factors, scale), rtol=1e-4, atol=1e-4 * abs(scale)):
        raise _unknown(softmax, "scales its scores by something else than a number")
    relative = torch.where(expected, bias - bias.diagonal(dim1=1, dim2=2)[..., None], 0)
    slopes = relative[:, -1, -2]  # one position before the query
    if window > 1 and not torch.allclose(
        relative, torch.where(expected, slopes[:, None, None] * (row - column), 0), rtol=1e-2, atol=1e-2
    ):
        raise _unknown(softmax, "has a bias that is not linear in the distance")
    return _Scores(_exact(scale), 0 if window == rows else window, -slopes if bool(slopes.any()) else None)


def _exact(scale: float) -> float:
    """1 / sqrt(n) and 1 without the noise of the estimate."""
    for candidate in (1.0, *(n**-0.5 for n in range(2, 1025))):
        if abs(scale - candidate) < 1e-5 * candidate:
            return candidate
    return scale


def _unknown(softmax: fx.Node, what: str) -> UnsupportedError:
    stack = softmax.meta.get("nn_module_stack") or {}
    where = [path for path, _ in stack.values()][-1:] or [softmax.name]
    return UnsupportedError(
        f"attention in {where[0]} {what}",
        hint="supported are causal and sliding-window masks, and ALiBi",
    )
