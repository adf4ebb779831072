"""Normalize only the rows that reach the LM head: the selection moves in front of the norm."""

from __future__ import annotations

import torch

from tapeout.compiler.graph import Graph


def norm_selected_rows(graph: Graph) -> int:
    """Returns the number of norms that now follow the selection of their rows (one in a causal LM)."""
    count = 0
    for select in graph.nodes(torch.ops.tapeout.select_rows.default):
        norm, rows = select.args
        if norm.target is not torch.ops.tapeout.rms_norm.default or len(norm.users) != 1:
            continue
        x, *rest = norm.args
        selected = graph.call(select, torch.ops.tapeout.select_rows.default, x, rows)
        select.replace_all_uses_with(graph.call(select, torch.ops.tapeout.rms_norm.default, selected, *rest))
        graph.graph.erase_node(select)
        graph.graph.erase_node(norm)
        count += 1
    return count
