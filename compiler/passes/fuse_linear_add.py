"""Fuse a linear with the addition of the residual stream to it into `tapeout::linear_add`."""

from __future__ import annotations

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, shape


def fuse_linear_add(graph: Graph) -> int:
    """Returns the number of additions fused. Of two linears the later one is the product."""
    count = 0
    for add in graph.nodes(aten.add.Tensor):
        if add.kwargs or not all(isinstance(a, fx.Node) and shape(a) == shape(add) for a in add.args):
            continue  # a factor, a number or a broadcast
        if add.args[0] is add.args[1]:
            continue
        products = [a for a in add.args if _is_product(graph, a)]
        if not products:
            continue
        product = max(products)
        residual = add.args[0] if add.args[1] is product else add.args[1]
        x, weight, bias = (*product.args, None)[:3]
        fused = graph.call(add, torch.ops.tapeout.linear_add.default, x, residual, weight, bias)
        add.replace_all_uses_with(fused)
        graph.graph.erase_node(add)
        graph.graph.erase_node(product)
        count += 1
    return count


def _is_product(graph: Graph, node: fx.Node) -> bool:
    """A linear that only the addition reads."""
    if node.target is not aten.linear.default or len(node.users) != 1:
        return False
    return all(graph.weight_name(w) is not None for w in node.args[1:] if w is not None)
