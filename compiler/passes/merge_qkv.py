"""Merge the query, key and value projections of a layer into one linear.

The three results become column slices of one matrix; where query and key are rotated with
the same table and nothing in between, one rotation covers both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, shape
from tapeout.compiler.passes.merge_linear import can_merge, merge_linears

_ROPE = torch.ops.tapeout.rope.default
_THROUGH = frozenset(
    {_ROPE, torch.ops.tapeout.rms_norm.default, aten.view.default, aten.reshape.default, aten.transpose.int}
)


def merge_qkv(graph: Graph) -> int:
    """Returns the number of attention layers whose projections were merged."""
    count = 0
    for attention in graph.nodes(torch.ops.tapeout.attention.default):
        linears = [_projection(argument) for argument in attention.args[:3]]
        if any(n is None for n in linears) or not can_merge(graph, linears):
            continue
        merge_linears(graph, linears, "qkv_proj")
        _merge_rope(graph, attention)
        count += 1
    return count


def _projection(node: fx.Node) -> fx.Node | None:
    """The linear a query, key or value comes from."""
    while node.target in _THROUGH:
        node = node.args[0]
    return node if node.target is aten.linear.default else None


@dataclass(frozen=True)
class _Heads:
    """rope(view(columns of the merged linear)) as one finds it after merging."""

    source: fx.Node
    start: int
    stop: int
    head_dim: int


def _merge_rope(graph: Graph, attention: fx.Node) -> None:
    q, k = attention.args[:2]
    if q.target is not _ROPE or k.target is not _ROPE or q.args[1:] != k.args[1:]:
        return
    first, second = _heads(q), _heads(k)
    if first is None or second is None or first.source is not second.source or first.stop != second.start:
        return
    if first.head_dim != second.head_dim or len(q.users) != 1 or len(k.users) != 1:
        return
    split = (first.stop - first.start) // first.head_dim
    heads = (second.stop - first.start) // first.head_dim
    view = k.args[0]
    rows = view.args[1][1]
    both = graph.call(attention, aten.slice.Tensor, first.source, -1, first.start, second.stop)
    both = graph.call(attention, aten.view.default, both, [1, rows, heads, first.head_dim])
    both = graph.call(attention, _ROPE, both, *q.args[1:])
    new_q = graph.call(attention, aten.slice.Tensor, both, 2, 0, split)
    new_k = graph.call(attention, aten.slice.Tensor, both, 2, split, heads)
    attention.args = (new_q, new_k, *attention.args[2:])


def _heads(rope: fx.Node) -> _Heads | None:
    view = rope.args[0]
    if view.target is not aten.view.default or view.args[0].target is not aten.slice.Tensor:
        return None
    source, dim, start, stop = view.args[0].args
    return _Heads(source, start, stop, int(shape(view)[-1])) if dim == -1 else None
