"""A LayerNorm of its own for each head becomes one norm of all heads and one product with their weights.

StableLM 2 splits `[1, H, T, D]` into heads, norms each with its own weight `[D]` and joins them again.
Without weights the norms are one op over rows of D; the weights side by side are a vector of H * D.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from tapeout.compiler.graph import Graph, aten, shape
from tapeout.model_defs.weights import WeightRef


def join_head_norms(graph: Graph) -> int:
    """Returns the number of tensors of heads whose norms were joined."""
    count = 0
    for node in list(graph.nodes(aten.cat.default)):
        given: tuple[Any, ...] = node.args
        dim = given[1] if len(given) > 1 else 0
        found = _heads(graph, given[0]) if dim == 1 and len(shape(node)) == 4 else None
        if found is None:
            continue
        x, eps, names = found
        heads, size = len(names), int(shape(x)[-1])
        weight = graph.add_weight(
            f"{names[0]}.heads", WeightRef.concat([graph.weights[name] for name in names], 0)
        )
        norm = graph.call(node, aten.layer_norm.default, x, [size], None, None, eps)
        rows = graph.call(node, aten.transpose.int, norm, 1, 2)
        flat = graph.call(node, aten.reshape.default, rows, [1, -1, heads * size])
        scaled = graph.call(node, aten.mul.Tensor, flat, weight)
        split = graph.call(node, aten.reshape.default, scaled, [1, -1, heads, size])
        node.replace_all_uses_with(graph.call(node, aten.transpose.int, split, 1, 2))
        count += 1
    return count


def _heads(graph: Graph, norms: Any) -> tuple[fx.Node, float, list[str]] | None:
    """The tensor whose heads these are, all and in order; the norms' epsilon; their weights' names."""
    sources, epsilons, names = set(), set(), []
    for index, norm in enumerate(norms):
        if norm.target is not aten.layer_norm.default or len(norm.args) < 5 or norm.args[3] is not None:
            return None
        head, weight = norm.args[0], norm.args[2]
        name = None if weight is None else graph.weight_name(weight)
        if head.target is not operator.getitem or head.args[1] != index or name is None:
            return None
        sources.add(head.args[0])
        epsilons.add(float(norm.args[4]))
        names.append(name)
    if len(sources) != 1 or len(epsilons) != 1:
        return None
    split = sources.pop()
    if split.target is not aten.split.Tensor or tuple(split.args[1:]) != (1, 1):
        return None
    x: fx.Node = split.args[0]
    return (x, epsilons.pop(), names) if shape(x)[1] == len(names) else None
