"""Only the rows that are sampled reach the LM head: `x[:, row_ids]` becomes `tapeout::select_rows`."""

from __future__ import annotations

import torch

from tapeout.compiler.graph import Graph, aten


def select_logit_rows(graph: Graph) -> int:
    """Returns the number of selections replaced (one in a causal LM)."""
    (rows,) = [n for n in graph.graph.find_nodes(op="placeholder") if n.name == "row_ids"]
    count = 0
    for index in graph.nodes(aten.index.Tensor):
        source, indices = index.args
        if list(indices) != [None, rows]:
            continue
        selected = graph.call(index, torch.ops.tapeout.select_rows.default, source, rows)
        index.replace_all_uses_with(selected)
        graph.graph.erase_node(index)
        count += 1
    return count
