"""Fuse the arithmetic of RMSNorm into `tapeout::rms_norm`."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, dtype, shape
from tapeout.compiler.match import Pattern, example, find, make_pattern
from tapeout.plugins.rms_norm.decomposition import PLAIN, VARIANTS

_EPS = 1.2345e-5  # sentinel


def fuse_rms_norm(graph: Graph) -> int:
    """Returns the number of norms fused."""
    count = 0
    for pattern, offset, cast_first in _patterns(_model_dtype(graph)):
        for match in find(graph.graph, pattern):
            x, weight = match.inputs
            if graph.weight_name(weight) is None:
                continue
            (out,) = match.outputs
            out.replace_all_uses_with(
                _norm(graph, out, x, weight, float(match.literals["eps"]), offset, cast_first)
            )
            count += 1
    graph.graph.eliminate_dead_code()  # or the norms just fused would match once more, without their weights
    for pattern in _plain_patterns(_model_dtype(graph)):
        for match in find(graph.graph, pattern):
            (x,), (out,) = match.inputs, match.outputs
            ones = graph.add_constant("rms_norm.ones", np.ones(int(shape(x)[-1]), np.float32))
            out.replace_all_uses_with(_norm(graph, out, x, ones, float(match.literals["eps"]), 0.0, False))
            count += 1
    return count


def _norm(graph: Graph, out: fx.Node, x: fx.Node, *attrs: object) -> fx.Node:
    """The fused op; on [1, H, T, D] it works on the transposed tensor, where rows lead."""
    sizes = shape(x)
    if len(sizes) == 4 and not isinstance(sizes[2], int):
        rows = graph.call(out, aten.transpose.int, x, 1, 2)
        norm = graph.call(out, torch.ops.tapeout.rms_norm.default, rows, *attrs)
        return graph.call(out, aten.transpose.int, norm, 1, 2)
    return graph.call(out, torch.ops.tapeout.rms_norm.default, x, *attrs)


def _model_dtype(graph: Graph) -> torch.dtype:
    (output,) = graph.graph.find_nodes(op="output")
    return dtype(output.args[0][0])


@cache
def _patterns(model_dtype: torch.dtype) -> list[tuple[Pattern, float, bool]]:
    """The spellings at this dtype; rank is no part of them, so query and key norms match too."""
    x, weight = example((1, 5, 8), model_dtype), example((8,), model_dtype)
    return [(make_pattern(f, (x, weight), {"eps": _EPS}), offset, cast) for f, offset, cast in VARIANTS]


@cache
def _plain_patterns(model_dtype: torch.dtype) -> list[Pattern]:
    return [make_pattern(f, (example((1, 5, 8), model_dtype),), {"eps": _EPS}) for f in PLAIN]
