"""Fuse the rotation of queries and keys, and the norms before it, with paged attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, shape

_ROPE = torch.ops.tapeout.rope.default
_NORM = torch.ops.tapeout.rms_norm.default
_NO_NORM = (0.0, 0.0, False)  # eps, weight_offset, cast_before_weight


@dataclass(frozen=True)
class _Rotated:
    """Queries or keys as attention reads them: a rotation, or some heads of one (`window`: dim, start, stop).

    `norm` is the one before the rotation that nothing else reads, if there is one.
    """

    rope: fx.Node
    window: tuple[Any, ...]
    norm: fx.Node | None


def fuse_rope_attention(graph: Graph) -> int:
    """Returns the number of attention calls that now rotate queries and keys themselves.

    Both must be turned over whole heads by one table, and read by nothing else. Norms join where
    both have one and these differ in nothing but the weight; others stay in front.
    """
    count = 0
    for attention in graph.nodes(torch.ops.tapeout.paged_attention.default):
        q, k = (_rotated(graph, argument, attention) for argument in attention.args[:2])
        if q is None or k is None or q.rope.args[1:] != k.rope.args[1:]:
            continue
        table, interleaved = q.rope.args[1:]
        if shape(table)[-1] != shape(attention.args[0])[-1]:
            continue
        v, slopes, sinks, *rest, alibi = attention.args[2:]
        if alibi or slopes is not None:
            continue
        if q.norm is not None and k.norm is not None and q.norm.args[2:] == k.norm.args[2:]:
            sources, weights = (q.norm.args[0], k.norm.args[0]), (q.norm.args[1], k.norm.args[1])
            norm = (True, *q.norm.args[2:])
        else:
            sources, weights = (q.rope.args[0], k.rope.args[0]), (None, None)
            norm = (False, *_NO_NORM)
        heads = [
            graph.call(attention, aten.slice.Tensor, source, *r.window) if r.window else source
            for source, r in zip(sources, (q, k), strict=True)
        ]
        fused = graph.call(
            attention, torch.ops.tapeout.rope_attention.default, *heads, v, table, *weights, sinks, *rest,
            interleaved, *norm,
        )  # fmt: skip
        attention.replace_all_uses_with(fused)
        graph.graph.erase_node(attention)
        count += 1
    return count


def _rotated(graph: Graph, argument: fx.Node, attention: fx.Node) -> _Rotated | None:
    """How an argument of `attention` was rotated; None when it was not, or when others read the result."""
    rope: Any = argument
    window: tuple[Any, ...] = ()
    if argument.target is aten.slice.Tensor and len(argument.args) == 4 and argument.args[1] == 2:
        rope, window = argument.args[0], argument.args[1:]
    if rope.target is not _ROPE or not all(_leads_only_to(attention, user) for user in rope.users):
        return None
    norm = rope.args[0]
    joins = norm.target is _NORM and len(norm.users) == 1 and _is_vector(graph, norm.args[1])
    return _Rotated(rope, window, norm if joins else None)


def _leads_only_to(attention: fx.Node, node: fx.Node) -> bool:
    """The node is `attention`, or some heads that only `attention` reads."""
    return node is attention or (node.target is aten.slice.Tensor and set(node.users) == {attention})


def _is_vector(graph: Graph, node: fx.Node) -> bool:
    return graph.weight_name(node) is not None and len(shape(node)) == 1
