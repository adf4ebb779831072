"""Matrix products with a weight in any spelling become `linear`, lookups in tables `embedding`.

`addmm` and `mm` hold their weight transposed (GPT-2's Conv1D); ids that are positions plus a number read a
table from that row on (OPT).
"""

from __future__ import annotations

from torch import fx

from tapeout.compiler.graph import Graph, aten, shape

_RESHAPES = frozenset({aten.view.default, aten.reshape.default})


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
    have = next((n for n, r in graph.weights.items() if r == turned), None)
    if have is None:
        new = graph.add_weight(f"{name}.transposed", turned)
    else:
        new = next(n for n in graph.graph.find_nodes(op="placeholder") if n.meta.get("weight") == have)
    linear = graph.call(node, aten.linear.default, x, new, *bias)
    node.replace_all_uses_with(linear)
    if not bias and len(linear.users) == 1:
        (user,) = linear.users
        if user.target is aten.add.Tensor:
            _bias(graph, user)
    return True


def _embedding(graph: Graph, node: fx.Node) -> bool:
    """Rows from an offset on: a table without its first rows."""
    weight, ids = node.args[:2]
    name = graph.weight_name(weight)
    through = ids.args[0] if ids.op == "call_function" and ids.target in _RESHAPES else ids
    if name is None or through.op != "call_function" or through.target is not aten.add.Tensor:
        return False
    source, offset = through.args
    if not isinstance(offset, int) or isinstance(offset, bool) or offset <= 0:
        return False
    ref = graph.weights[name]
    table = graph.add_weight(f"{name}.from_{offset}", ref.slice(0, offset, ref.shape[0]))
    if through is not ids:
        source = graph.call(node, ids.target, source, *ids.args[1:])
    node.replace_all_uses_with(graph.call(node, aten.embedding.default, table, source))
    return True


def _index_select(graph: Graph, node: fx.Node) -> bool:
    """Rows of a table by a list of ids."""
    table, dim, ids = node.args
    if dim != 0 or graph.weight_name(table) is None or len(shape(table)) != 2:
        return False
    embedding = graph.call(node, aten.embedding.default, table, ids)
    node.replace_all_uses_with(embedding)
    _embedding(graph, embedding)
    return True


def _bias(graph: Graph, node: fx.Node) -> bool:
    """A vector of the checkpoint added to the result of a linear."""
    for linear, bias in (node.args, node.args[::-1]):
        if (
            not isinstance(linear, fx.Node)
            or linear.target is not aten.linear.default
            or len(linear.args) != 2
        ):
            continue
        if graph.weight_name(bias) is None or len(shape(bias)) != 1 or len(linear.users) != 1:
            continue
        node.replace_all_uses_with(graph.call(node, aten.linear.default, *linear.args, bias))
        return True
    return False


_RULES = {
    aten.add.Tensor: _bias,
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    aten.matmul.default: _mm,
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
}
