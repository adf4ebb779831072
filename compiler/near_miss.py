"""Where a pass should have matched and did not: what an error about its match count shows.

Every fusion leaves a telltale op behind where its pattern did not fit: an RMSNorm that was not
fused still has its `rsqrt`. The module of Hugging Face's code it stands in says which layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten
from tapeout.compiler.passes.activations import activation_kind

_SHOWN = 3


def near_misses(graph: Graph, pass_name: str) -> list[str]:
    """One line each for the first places that look like a match of the pass, after it ran.

    Empty for passes without a telltale op, and where nothing of the kind is left.
    """
    nodes = _CANDIDATES[pass_name](graph) if pass_name in _CANDIDATES else []
    lines = [f"{node.name} ({node.target}) in {_module_of(node)}" for node in nodes[:_SHOWN]]
    more = len(nodes) - _SHOWN
    return [*lines, f"and {more} more"] if more > 0 else lines


def _calls(target: Callable[..., object]) -> Callable[[Graph], list[fx.Node]]:
    return lambda graph: graph.nodes(target)


def _separate_projections(graph: Graph) -> list[fx.Node]:
    """Attention whose queries, keys and values come from more than one linear."""
    calls = graph.nodes(torch.ops.tapeout.attention.default)
    return [call for call in calls if len({_origin(argument) for argument in call.args[:3]}) > 1]


def _origin(node: fx.Node) -> fx.Node:
    """The linear that leads to a node along first arguments, else where that path starts."""
    while node.op == "call_function" and node.target is not aten.linear.default:
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node):
            break
        node = first
    return node


def _late_selections(graph: Graph) -> list[fx.Node]:
    """Selections of rows that have been normed already, and such as are no `select_rows` yet."""
    selections = graph.nodes(torch.ops.tapeout.select_rows.default)
    return graph.nodes(aten.index.Tensor) + [n for n in selections if _norm_behind(n.args[0])]


def _norm_behind(node: fx.Node) -> bool:
    if node.target is operator.getitem and node.args[1] == 0:  # the other result is the sum
        node = node.args[0]
    return node.target in {torch.ops.tapeout.rms_norm.default, torch.ops.tapeout.add_rms_norm.default}


def _norms_of_linears(graph: Graph) -> list[fx.Node]:
    """Norms that linears read."""
    norms = graph.nodes(torch.ops.tapeout.rms_norm.default)
    return [n for n in norms if any(u.target is aten.linear.default for u in n.users)]


def _activations(graph: Graph) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if activation_kind(node) is not None]


def _module_of(node: fx.Node) -> str:
    """`model.layers.3.mlp`: the innermost module that made the call."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("model_under_trace").removeprefix(".") or "the model itself"


#: What is left where a pass did not match.
_CANDIDATES: Mapping[str, Callable[[Graph], list[fx.Node]]] = {
    "fuse_rms_norm": _calls(aten.rsqrt.default),
    "fuse_rope": _calls(aten.neg.default),  # the half that is rotated
    "merge_qkv": _separate_projections,
    "fuse_gated_mlp": _activations,
    "page_attention": _calls(torch.ops.tapeout.attention.default),
    "select_logit_rows": _calls(aten.index.Tensor),
    "fuse_rope_attention": _calls(torch.ops.tapeout.rope.default),
    "select_rows_early": _late_selections,
    "fuse_linear_add": _calls(aten.add.Tensor),
    "fuse_norm_linear": _norms_of_linears,
}
