"""Layer normalisation, torch's own or written out, becomes `tapeout::layer_norm`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, dtype, shape
from tapeout.compiler.match import Pattern, example, find, make_pattern
from tapeout.plugins.layer_norm.decomposition import cohere

_EPS = 1.2345e-5  # sentinel
_DEFAULTS: tuple[Any, ...] = (None, None, 1e-5)  # weight, bias and eps of aten.layer_norm


def fuse_layer_norm(graph: Graph) -> int:
    """Returns the number of norms fused."""
    count = 0
    for node in graph.nodes(aten.layer_norm.default):
        given: tuple[Any, ...] = node.args[:5]
        x, sizes, weight, bias, eps = (*given, *_DEFAULTS[len(given) - 2 :])
        if len(sizes) != 1:
            continue
        if weight is None:
            weight = graph.add_constant("layer_norm.ones", np.ones(int(shape(x)[-1]), np.float32))
        node.replace_all_uses_with(_norm(graph, node, x, weight, bias, float(eps)))
        count += 1
    for match in find(graph.graph, _pattern(_model_dtype(graph))):
        x, weight = match.inputs
        (out,) = match.outputs
        if graph.weight_name(weight) is None or len(shape(weight)) != 1:
            continue
        out.replace_all_uses_with(_norm(graph, out, x, weight, None, float(match.literals["eps"])))
        count += 1
    return count


def _norm(graph: Graph, out: fx.Node, x: fx.Node, *arguments: object) -> fx.Node:
    """The fused op; on [1, H, T, D] it works on the transposed tensor, where rows lead."""
    op, sizes = torch.ops.tapeout.layer_norm.default, shape(x)
    if len(sizes) != 4 or isinstance(sizes[2], int):
        return graph.call(out, op, x, *arguments)
    norm = graph.call(out, op, graph.call(out, aten.transpose.int, x, 1, 2), *arguments)
    return graph.call(out, aten.transpose.int, norm, 1, 2)


def _model_dtype(graph: Graph) -> torch.dtype:
    (output,) = graph.graph.find_nodes(op="output")
    node: fx.Node = output.args[0][0]
    return dtype(node)


@cache
def _pattern(model_dtype: torch.dtype) -> Pattern:
    x, weight = example((1, 5, 8), model_dtype), example((8,), model_dtype)
    return make_pattern(cohere, (x, weight), {"eps": _EPS})
