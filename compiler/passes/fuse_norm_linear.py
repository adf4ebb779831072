"""Fuse an RMSNorm with the linear that reads it, and the gated activation behind, into `norm_linear`."""

from __future__ import annotations

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, shape

_GATED = torch.ops.tapeout.gated_activation.default


def fuse_norm_linear(graph: Graph) -> int:
    """Returns the number of norms fused. A norm with other readers stays: it would be computed twice."""
    count = 0
    for norm in graph.nodes(torch.ops.tapeout.rms_norm.default):
        linear = _only_user(norm)
        if linear is None or not _fits(graph, norm, linear):
            continue
        last, activation = linear, ""
        reader = _only_user(linear)
        if reader is not None and reader.target is _GATED:
            last, activation = reader, reader.args[1]
        x, norm_weight, *attrs = norm.args
        _, weight, bias = (*linear.args, None)[:3]
        fused = graph.call(
            last, torch.ops.tapeout.norm_linear.default, x, norm_weight, weight, bias, *attrs, activation
        )
        last.replace_all_uses_with(fused)
        for node in dict.fromkeys((last, linear, norm)):
            graph.graph.erase_node(node)
        count += 1
    return count


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _fits(graph: Graph, norm: fx.Node, linear: fx.Node) -> bool:
    """A linear of checkpoint weights over normed rows (norms of heads have one dimension more)."""
    if linear.target is not aten.linear.default or linear.args[0] is not norm or len(shape(norm)) != 3:
        return False
    if len(shape(norm.args[1])) != 1:
        return False
    weights = (norm.args[1], *(w for w in linear.args[1:] if w is not None))
    return all(graph.weight_name(w) is not None for w in weights)
