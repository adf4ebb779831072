"""Merge linears that read the same activation into one; shared by the merging passes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tapeout.compiler.graph import Graph, aten, shape
from tapeout.model_defs.weights import WeightRef


def can_merge(graph: Graph, linears: Sequence[fx.Node]) -> bool:
    """True when distinct linears share their input, and all or none have a bias."""
    if len(set(linears)) != len(linears) or len({n.args[0] for n in linears}) != 1:
        return False
    weights = [n.args[1:] for n in linears]
    if len({len(w) for w in weights}) != 1:
        return False
    return all(graph.weight_name(w) is not None for row in weights for w in row)


def merge_linears(graph: Graph, linears: Sequence[fx.Node], name: str) -> fx.Node:
    """Replace the linears by one over concatenated weights, and their results by column slices.

    The merged weights are named after the first one, with its module replaced by `name`.
    """
    first = min(linears)
    weights = []
    for column in zip(*(n.args[1:] for n in linears), strict=True):
        sources = [graph.weight_of(w) for w in column]
        module, _, leaf = sources[0][0].rpartition(".")
        merged_name = f"{module.rpartition('.')[0]}.{name}.{leaf}"
        weights.append(graph.add_weight(merged_name, WeightRef.concat([ref for _, ref in sources])))
    merged = graph.call(first, aten.linear.default, first.args[0], *weights)
    start = 0
    for linear in linears:
        stop = start + int(shape(linear)[-1])
        part = graph.call(first, aten.slice.Tensor, merged, -1, start, stop)
        linear.replace_all_uses_with(part)
        start = stop
    for linear in linears:
        graph.graph.erase_node(linear)
    return merged
