"""Only the rows that are sampled pass what follows the last attention: the selection moves up to it.

Of a prompt one row reaches the LM head, and nothing behind the last layer's attention looks at another
row. So that layer's output projection and MLP, and the last norm, run on the selected rows alone.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, shape

#: What makes every row of its result from the same row of its operands.
_ROW_WISE = {
    aten.linear.default,
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.silu.default,
    aten.gelu.default,
    aten.relu.default,
    aten.tanh.default,
    operator.getitem,
    *(
        getattr(torch.ops.tapeout, name).default
        for name in (
            "rms_norm", "layer_norm", "add_rms_norm", "activation", "gated_activation", "xielu", "mul_weight",
            "scale", "moe_router", "moe_experts",
        )
    ),
}  # fmt: skip
_SELECT = torch.ops.tapeout.select_rows.default


def select_rows_early(graph: Graph) -> int:
    """Returns the number of selections that moved (one in a causal LM)."""
    count = 0
    for select in graph.nodes(_SELECT):
        source, rows = select.args
        dimension = shape(source)[1]
        late = _only_for(select, source, dimension)
        if not late:
            continue
        moved: dict[fx.Node, fx.Node] = {}
        for node in [n for n in graph.graph.nodes if n in late]:
            for operand in node.all_input_nodes:
                if operand not in moved and _has_rows(operand, dimension):
                    moved[operand] = graph.call(select, _SELECT, operand, rows)
            args = fx.map_arg(node.args, lambda a, moved=moved: moved.get(a, a))
            moved[node] = graph.call(select, node.target, *args)
            moved[node].meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        select.replace_all_uses_with(moved[source])
        graph.graph.erase_node(select)
        count += 1
    return count


def _only_for(select: fx.Node, source: fx.Node, dimension: object) -> set[fx.Node]:
    """The row-wise calls, `source` first, whose results nobody but `select` comes to see."""
    late: set[fx.Node] = set()
    waiting = [source]
    while waiting:
        node = waiting.pop()
        if node in late or node.target not in _ROW_WISE or node.kwargs:
            continue
        if not all(_has_rows(n, dimension) or _has_no_rows(n) for n in node.all_input_nodes):
            continue  # rows that lie elsewhere
        if not all(user is select or user in late for user in node.users):
            continue  # looked at again if its other users turn out to be late as well
        late.add(node)
        waiting += node.all_input_nodes
    # One result of a call that others need as well: its rows can be selected, the call's cannot.
    return {n for n in late if n.target is not operator.getitem or n.args[0] in late}


def _has_rows(node: fx.Node, dimension: object) -> bool:
    """Is this a tensor with the step's rows, neither a weight nor a number?"""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim > 2 and value.shape[1] == dimension


def _has_no_rows(node: fx.Node) -> bool:
    """Is its size the same in every step? A call with several results has none itself."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or all(isinstance(size, int) for size in value.shape)
