"""Matrix products with a weight in any spelling become `linear`, lookups in tables `embedding`.

`addmm` and `mm` hold their weight transposed (GPT-2's Conv1D); ids that are positions plus a number read a
table from that row on (OPT).
"""

from __future__ import annotations

from torch import fx

from tapeout.compiler.graph import Graph, aten, shape


def recognize_linears(graph: Graph) -> int:
    """Returns the number of calls that were rewritten."""
    count = 0
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _RULES and node.users:
            count += _RULES[node.target](graph, node)
    return count


def _addmm(graph: Graph, node: fx.Node) -> bool:
    bias, x, weight = node.args
    return not node.kwargs and graph.weight_name(bias) is not None and _linear(graph, node, x, weight, bias)


def _mm(graph: Graph, node: fx.Node) -> bool:
    return _linear(graph, node, *node.args)


def _linear(graph: Graph, node: fx.Node, x: fx.Node, weight: fx.Node, *bias: fx.Node) -> bool:
    """`x @ weight`; False when the second factor is no matrix of the checkpoint."""
    if graph.weight_name(weight) is None or len(shape(weight)) != 2:
        return False
    name, ref = graph.weight_of(weight)
    turned = ref.transpose()
    have = next((n for n, r in graph.weights.items() if r.text() == turned.text() and r == turned), None)
    if have is None:
        new = graph.add_weight(f"{name}.transposed", turned)
    else:
        new = next(n for n in graph.graph.find_nodes(op="placeholder") if n.meta.get("weight") == have)
    node.replace_all_uses_with(graph.call(node, aten.linear.default, x, new, *bias))
    return True


def _embedding(graph: Graph, node: fx.Node) -> bool:
    """Rows from an offset on: a table without its first rows."""
    weight, ids = node.args[:2]
    name = graph.weight_name(weight)
    if name is None or ids.op != "call_function" or ids.target is not aten.add.Tensor or ids.kwargs:
        return False
    source, offset = ids.args
    if not isinstance(offset, int) or isinstance(offset, bool) or offset <= 0:
        return False
    ref = graph.weights[name]
    table = graph.add_weight(f"{name}.from_{offset}", ref.slice(0, offset, ref.shape[0]))
    node.replace_all_uses_with(graph.call(node, aten.embedding.default, table, source))
    return True


_RULES = {
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    aten.matmul.default: _mm,
    aten.embedding.default: _embedding,
}
