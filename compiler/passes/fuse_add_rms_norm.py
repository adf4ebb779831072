"""Fuse a residual addition with the RMSNorm that reads it into `tapeout::add_rms_norm`."""

from __future__ import annotations

import operator

import torch

from tapeout.compiler.graph import Graph, aten


def fuse_add_rms_norm(graph: Graph) -> int:
    """Returns the number of additions fused."""
    count = 0
    for norm in graph.nodes(torch.ops.tapeout.rms_norm.default):
        add, *rest = norm.args
        if add.target is not aten.add.Tensor or add.kwargs or len(add.args) != 2:
            continue
        if not all(hasattr(a, "meta") and a.meta["val"].shape == add.meta["val"].shape for a in add.args):
            continue  # a scalar or a broadcast is no residual
        # `x` is the branch, `residual` the stream; the sum does not depend on the order.
        residual, x = add.args
        # The pair stands where the addition stood, so that earlier readers of the sum stay after it.
        pair = graph.call(add, torch.ops.tapeout.add_rms_norm.default, x, residual, *rest)
        out = graph.call(add, operator.getitem, pair, 0)
        total = graph.call(add, operator.getitem, pair, 1)
        norm.replace_all_uses_with(out)
        add.replace_all_uses_with(total)
        count += 1
        graph.graph.erase_node(norm)
        graph.graph.erase_node(add)
    return count
