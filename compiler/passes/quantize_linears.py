"""Quantize linears: int8 weights with a scale per output row, activations quantized as they come."""

from __future__ import annotations

import torch

from tapeout.compiler.graph import Graph, aten


def quantize_linears(graph: Graph) -> int:
    """Replace every linear over a plain weight by `tapeout::linear_int8`; returns how many."""
    count = 0
    made: dict[str, tuple[torch.fx.Node, torch.fx.Node]] = {}
    for linear in graph.nodes(aten.linear.default):
        x, weight, *bias = linear.args
        name = graph.weight_name(weight)
        if name is None:
            continue
        if name not in made:
            ref = graph.weights[name]
            values = graph.add_weight(f"{name}.int8", ref.quantize_rows("values"))
            made[name] = values, graph.add_weight(f"{name}.scale", ref.quantize_rows("scales"))
        quantized = graph.call(
            linear, torch.ops.tapeout.linear_int8.default, x, *made[name], bias[0] if bias else None
        )
        linear.replace_all_uses_with(quantized)
        graph.graph.erase_node(linear)
        count += 1
    return count
