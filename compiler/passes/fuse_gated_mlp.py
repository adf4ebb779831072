"""Merge gate and up projections and fuse their product into `tapeout::gated_activation`."""

from __future__ import annotations

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten
from tapeout.compiler.passes.activations import activation_kind
from tapeout.compiler.passes.merge_linear import can_merge, merge_linears


def fuse_gated_mlp(graph: Graph) -> int:
    """Returns the number of gated MLPs fused."""
    count = 0
    for product in graph.nodes(aten.mul.Tensor):
        for gate, up in (product.args, product.args[::-1]):
            if not isinstance(gate, fx.Node) or not isinstance(up, fx.Node):
                continue
            kind = activation_kind(gate)
            if (
                kind is None
                or gate.args[0].target is not aten.linear.default
                or up.target is not aten.linear.default
            ):
                continue
            linears = [gate.args[0], up]
            if not can_merge(graph, linears) or any(len(n.users) != 1 for n in (gate, *linears)):
                continue
            merged = merge_linears(graph, linears, "gate_up_proj")
            fused = graph.call(product, torch.ops.tapeout.gated_activation.default, merged, kind)
            product.replace_all_uses_with(fused)
            count += 1
            break
    return count
