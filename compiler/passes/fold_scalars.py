"""Fold scalar constants (embedding scales and the like) into the graph as numbers."""

from __future__ import annotations

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten


def fold_scalars(graph: Graph) -> int:
    """Replace 0-d constant weights, also behind a cast, by Python numbers; returns how many uses."""
    count = 0
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


def _scalar(graph: Graph, node: object) -> float | None:
    if not isinstance(node, fx.Node) or tuple(node.meta["val"].shape) != ():
        return None
    if node.target is aten.to.dtype:
        inner = _scalar(graph, node.args[0])
        return None if inner is None else torch.tensor(inner).to(node.meta["val"].dtype).item()
    name = graph.weight_name(node)
    return float(graph.constants[name]) if name in graph.constants else None
