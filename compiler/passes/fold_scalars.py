"""Fold small constants into the graph: numbers (embedding scales and the like) and lists of indices."""

from __future__ import annotations

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten


def fold_scalars(graph: Graph) -> int:
    """Replace 0-d constant weights, also behind a cast, by Python numbers, and constant index lists by
    slices; returns how many uses."""
    count = sum(_slice(graph, node) for node in graph.nodes(aten.index.Tensor))
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in {
            aten.mul.Tensor,
            aten.add.Tensor,
            aten.div.Tensor,
        }:
            continue
        for index, argument in enumerate(node.args):
            value = _scalar(graph, argument)
            if value is not None:
                # A 0-d tensor of the same or a wider float type does not change the result's type.
                node.update_arg(index, value)
                count += 1
    return count


def _slice(graph: Graph, node: fx.Node) -> bool:
    """`x[..., [a, b, c]]` of consecutive constant indices becomes a slice."""
    x, indices = node.args
    if any(i is not None for i in indices[:-1]) or graph.weight_name(indices[-1]) not in graph.constants:
        return False
    values = graph.constants[str(graph.weight_name(indices[-1]))]
    dim = len(indices) - 1
    size = x.meta["val"].shape[dim]
    if values.ndim != 1 or values.dtype.kind != "i" or not isinstance(size, int):
        return False
    first = int(values[0]) % size
    if [int(v) % size for v in values] != list(range(first, first + len(values))):
        return False
    node.replace_all_uses_with(graph.call(node, aten.slice.Tensor, x, dim, first, first + len(values)))
    return True


def _scalar(graph: Graph, node: object) -> float | None:
    if not isinstance(node, fx.Node) or tuple(node.meta["val"].shape) != ():
        return None
    if node.target is aten.to.dtype:
        inner = _scalar(graph, node.args[0])
        return None if inner is None else torch.tensor(inner).to(node.meta["val"].dtype).item()
    name = graph.weight_name(node)
    return float(graph.constants[name]) if name in graph.constants else None
