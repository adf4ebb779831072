"""Fold what a model computes from one weight alone (a transpose, a slice, `weight + 1`) into its recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, dtype
from tapeout.model_defs.weights import CAST_DTYPES, WeightRef


def fold_weights(graph: Graph) -> int:
    """Returns the number of calls that became part of a recipe."""
    count = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in _RULES or not node.args:
            continue
        if node.target is aten.cat.default:
            name, ref = _joined(graph, node)
        else:
            name = graph.weight_name(node.args[0])
            if name is None or name in graph.constants or node.kwargs:
                continue
            ref = _RULES[node.target](graph.weights[name], node)
        if name is None or ref is None:
            continue
        node.replace_all_uses_with(_weight(graph, name, ref))
        graph.graph.erase_node(node)
        count += 1
    return count


def _weight(graph: Graph, name: str, ref: WeightRef) -> fx.Node:
    """The weight made by this recipe: an existing one of it, else a new one."""
    own = graph.weights[name].steps
    suffix = ".".join(s.name for s in (ref.steps[len(own) :] if ref.steps[: len(own)] == own else ref.steps))
    for node in graph.graph.find_nodes(op="placeholder"):
        have = graph.weights.get(node.meta.get("weight", ""))
        if have is not None and (have.text(), have.dtype, have.shape) == (ref.text(), ref.dtype, ref.shape):
            return node
    free = f"{name}.{suffix}"
    while free in graph.weights:
        free += "_"
    return graph.add_weight(free, ref)


def _joined(graph: Graph, node: fx.Node) -> tuple[str | None, WeightRef | None]:
    """Weights and nothing else joined along one dimension."""
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    names = [graph.weight_name(p) for p in parts]
    if any(n is None or n in graph.constants for n in names) or node.kwargs:
        return None, None
    return names[0], WeightRef.concat([graph.weights[str(n)] for n in names], dim)


def _transposed(ref: WeightRef, node: fx.Node) -> WeightRef | None:
    rank = len(ref.shape)
    dims = {int(d) % rank for d in node.args[1:3]} if len(node.args) > 1 else {0, 1}
    return ref.transpose() if rank >= 2 and dims == {rank - 2, rank - 1} else None


def _permuted(ref: WeightRef, node: fx.Node) -> WeightRef | None:
    rank = len(ref.shape)
    order = [int(d) % rank for d in node.args[1]]
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    return ref.transpose() if rank >= 2 and order == swapped else None


def _sliced(ref: WeightRef, node: fx.Node) -> WeightRef | None:
    defaults: tuple[Any, ...] = (0, None, None, 1)
    given: tuple[Any, ...] = tuple(node.args[1:])
    dim, *bounds = (*given, *defaults[len(given) :])
    size = ref.shape[dim]
    start, stop, step = slice(*bounds).indices(size)
    if step != 1:
        return ref.every(dim, start, step) if stop == size else None
    return ref.slice(dim, start, stop) if start < stop else None


def _reshaped(ref: WeightRef, node: fx.Node) -> WeightRef | None:
    sizes = node.meta["val"].shape
    return ref.reshape(tuple(sizes)) if all(isinstance(s, int) for s in sizes) else None


def _selected(ref: WeightRef, node: fx.Node) -> WeightRef | None:
    dim, index = (int(a) for a in node.args[1:3])
    dim, index = dim % len(ref.shape), index % ref.shape[dim]
    return ref.slice(dim, index, index + 1).reshape(tuple(node.meta["val"].shape))


def _added(ref: WeightRef, node: fx.Node) -> WeightRef | None:
    value = node.args[1]
    exact = isinstance(value, (int, float)) and dtype(node) is getattr(torch, ref.dtype)
    return ref.add(float(value)) if exact else None


def _cast(ref: WeightRef, node: fx.Node) -> WeightRef | None:
    name = str(dtype(node)).removeprefix("torch.")
    return ref.cast(name) if name in CAST_DTYPES else None


_RULES: dict[object, Callable[[WeightRef, fx.Node], WeightRef | None]] = {
    aten.t.default: _transposed,
    aten.numpy_T.default: _transposed,
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.slice.Tensor: _sliced,
    aten.select.int: _selected,
    aten.view.default: _reshaped,
    aten.reshape.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.cat.default: lambda ref, node: None,  # of several weights: see _joined
    aten.add.Tensor: _added,
    aten.to.dtype: _cast,
}
