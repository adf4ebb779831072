"""Fuse rotary position embedding: one table a step, one `tapeout::rope` for queries and for keys."""

from __future__ import annotations

from functools import cache

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, dtype, shape
from tapeout.compiler.match import Match, Pattern, example, find, make_pattern
from tapeout.plugins.rope.decomposition import rotate_half
from tapeout.plugins.rope_table import decomposition as table

_HALF = 37  # sentinel
_SCALING = 1.2345  # sentinel


def fuse_rope(graph: Graph) -> int:
    """Returns the number of tensors rotated (two a layer in most models)."""
    tables: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    count = 0
    for model_dtype in {dtype(n) for n in graph.nodes(torch.ops.tapeout.attention.default)}:
        sources = _find_tables(graph, model_dtype)
        for match in find(graph.graph, _rotation_pattern(model_dtype)):
            count += _rotate(graph, match, sources, tables)
    return count


def _rotate(
    graph: Graph,
    match: Match,
    sources: dict[fx.Node, Match],
    tables: dict[tuple[fx.Node, fx.Node], fx.Node],
) -> bool:
    """Replace one rotation; False when its cosines and sines are not a table of this graph."""
    x, cos, sin = match.inputs
    (out,) = match.outputs
    if shape(x)[-1] != 2 * match.literals["half"]:
        return False
    cos, sin = _before_unsqueeze(cos), _before_unsqueeze(sin)
    if cos not in sources or sin not in sources or sources[cos].inputs != sources[sin].inputs:
        return False
    if (cos, sin) not in tables:
        positions, inv_freq = sources[cos].inputs
        scaling = float(sources[cos].literals["scaling"])
        name = str(dtype(x)).removeprefix("torch.")
        anchor = min(cos, sin)
        tables[cos, sin] = graph.call(
            anchor, torch.ops.tapeout.rope_table.default, positions, inv_freq, scaling, name
        )
    # The fused op works on [1, T, H, D], as tensors lie before and after the model's transposes.
    rows = graph.call(out, aten.transpose.int, x, 1, 2)
    rotated = graph.call(out, torch.ops.tapeout.rope.default, rows, tables[cos, sin], False)
    out.replace_all_uses_with(graph.call(out, aten.transpose.int, rotated, 1, 2))
    return True


def _find_tables(graph: Graph, model_dtype: torch.dtype) -> dict[fx.Node, Match]:
    """Nodes that are the cosines or sines of positions times inverse frequencies."""
    found = {}
    for pattern in _table_patterns(model_dtype):
        for match in find(graph.graph, pattern):
            found[match.outputs[0]] = match
    return found


@cache
def _rotation_pattern(model_dtype: torch.dtype) -> Pattern:
    x = example((1, 3, 5, 2 * _HALF), model_dtype)
    cos, sin = (example((1, 1, 5, 2 * _HALF), model_dtype) for _ in range(2))
    return make_pattern(rotate_half, (x, cos, sin), {"half": _HALF})


@cache
def _table_patterns(model_dtype: torch.dtype) -> tuple[Pattern, Pattern]:
    """Cosines and sines."""
    examples = (example((1, 5), torch.int64), example((8,), torch.float32))
    cos, sin = (
        make_pattern(function, examples, {"scaling": _SCALING}, dtype=model_dtype)
        for function in (table.cos, table.sin)
    )
    return cos, sin


def _before_unsqueeze(node: fx.Node) -> fx.Node:
    return node.args[0] if node.target is aten.unsqueeze.default and node.args[1] == 1 else node
