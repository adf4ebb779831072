"""Recognize activation functions that Hugging Face code writes out (`0.5 * x * (1 + tanh(...))`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten
from tapeout.compiler.passes.activations import activation_kind
from tapeout.compiler.probe import Probe, Region, regions_above
from tapeout.plugins.activation.functions import FUNCTIONS
from tapeout.plugins.xielu.reference import xielu

_ELEMENTWISE = frozenset({
    aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.div.Tensor,
    aten.rsub.Scalar, aten.neg.default, aten.pow.Tensor_Scalar, aten.square.default, aten.tanh.default,
    aten.sigmoid.default, aten.exp.default, aten.erf.default, aten.relu.default, aten.silu.default,
    aten.gelu.default, aten.to.dtype, aten.clamp.default, aten.abs.default, aten.softplus.default,
    aten.where.self, aten.gt.Scalar, aten.minimum.default, aten.min.other, aten.expm1.default,
})  # fmt: skip
_MOST_NODES = 24  # no activation takes more
_TRIED = (0.7, -0.4, 0.45, -0.003)  # distinct values for the numbers of a trained activation


def recognize_activations(graph: Graph) -> int:
    """Returns the number of functions that became `tapeout::activation`."""
    count = 0
    done: set[fx.Node] = set()
    weights = {n for n in graph.graph.find_nodes(op="placeholder") if graph.weight_name(n) is not None}
    for node in reversed(list(graph.graph.nodes)):
        if node in done or node.target not in _ELEMENTWISE or not node.users:
            continue
        for region in reversed(regions_above([node], weights, _is_elementwise, _MOST_NODES)):
            if region.nodes.isdisjoint(done) and (numbers := _trained(graph, region)) is not None:
                vectors = [graph.call(node, aten.reshape.default, n, [1]) for n in numbers]
                call = graph.call(node, torch.ops.tapeout.xielu.default, region.source, *vectors)
                node.replace_all_uses_with(call)
                done |= region.nodes
                count += 1
                break
            kind = _kind(graph, region)
            if kind is None:
                continue
            done |= region.nodes
            if activation_kind(node) != kind or region.source is not node.args[0]:
                call = graph.call(node, torch.ops.tapeout.activation.default, region.source, kind)
                node.replace_all_uses_with(call)
                count += 1
            break
    return count


def _trained(graph: Graph, region: Region) -> tuple[fx.Node, ...] | None:
    """The four numbers of an `xielu`, in its order, when the region computes one of the checkpoint's."""
    numbers = [n for n in dict.fromkeys(a for node in region.nodes for a in node.all_input_nodes)
               if graph.weight_name(n) is not None]  # fmt: skip
    if len(numbers) != 4 or any(n.meta["val"].numel() != 1 for n in numbers):
        return None
    points = _points().float()
    given = {n: torch.full(tuple(n.meta["val"].shape), v) for n, v in zip(numbers, _TRIED, strict=True)}
    try:
        got = Probe(graph, torch.arange(1)).value(region.sinks[0], {region.source: points, **given})
    except (LookupError, RuntimeError):
        return None
    for order in itertools.permutations(numbers):
        if torch.allclose(got, xielu(points, *(given[n].reshape(1) for n in order)), rtol=1e-5, atol=1e-5):
            return order
    return None


def _is_elementwise(node: fx.Node) -> bool:
    return node.target in _ELEMENTWISE


def _kind(graph: Graph, region: Region) -> str | None:
    """The named function that the region computes; None when it is none of them."""
    if not region.source.meta["val"].is_floating_point():
        return None
    points = _points()
    try:
        got = Probe(graph, torch.arange(1)).value(region.sinks[0], {region.source: points})
    except (LookupError, RuntimeError):
        return None
    if got.shape != points.shape or got.dtype != points.dtype:
        return None
    for kind, values in _expected().items():
        if torch.allclose(got, values, rtol=1e-6, atol=1e-6):
            return kind
    return None


@cache
def _points() -> torch.Tensor:
    return torch.linspace(-12, 12, 481, dtype=torch.float64)


@cache
def _expected() -> Mapping[str, torch.Tensor]:
    return {kind: function(_points()) for kind, function in FUNCTIONS.items()}
