"""Find subgraphs that compute what a fused op's decomposition computes.

A decomposition is a plain torch function. It is exported and canonicalized like a model, so
that the pattern has the ops a model's own code has at that dtype. Numbers that vary between
models (an epsilon, half a head size) are given as sentinel values and captured on a match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from tapeout.compiler.graph import aten
from tapeout.compiler.passes.canonicalize import canonicalize_nodes

_COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})


@dataclass(frozen=True)
class Pattern:
    """An exported decomposition. `literals` maps a sentinel value to the name it is captured under."""

    name: str
    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    literals: Mapping[float, str]


@dataclass
class Match:
    """Where a pattern was found: nodes bound to inputs and outputs, captured numbers."""

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    literals: dict[str, float] = field(default_factory=dict)


def make_pattern(
    function: Callable[..., Any],
    examples: Sequence[torch.Tensor],
    literals: Mapping[str, float],
    **fixed: Any,
) -> Pattern:
    """Export `function(*examples, **literals, **fixed)`, which returns a tuple of outputs.

    Literals are captured on a match, fixed arguments are part of the pattern.
    """

    class Decomposition(nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args, **literals, **fixed)

    with torch.no_grad():
        module = torch.export.export(Decomposition(), tuple(examples), strict=False).graph_module
    canonicalize_nodes(module.graph)
    module.graph.eliminate_dead_code()
    inputs = tuple(module.graph.find_nodes(op="placeholder"))
    (output,) = module.graph.find_nodes(op="output")
    by_value = {value: name for name, value in literals.items()}
    if len(by_value) != len(literals):
        raise ValueError(f"sentinels of {function.__name__} are not distinct: {dict(literals)}")
    return Pattern(function.__name__, module.graph, inputs, tuple(output.args[0]), by_value)


def find(graph: fx.Graph, pattern: Pattern) -> Iterator[Match]:
    """All matches of the pattern's first output, in graph order.

    The graph may be edited between matches; nodes replaced or erased meanwhile are skipped.
    """
    for node in list(graph.find_nodes(op="call_function", target=pattern.outputs[0].target)):
        if node._erased or not node.users:
            continue
        bound = _bind(pattern, pattern.outputs[0], node, {}, {})
        if bound is None:
            continue
        nodes, literals = bound
        if all(output in nodes for output in pattern.outputs):
            yield Match(
                tuple(nodes[i] for i in pattern.inputs), tuple(nodes[o] for o in pattern.outputs), literals
            )


_Bound = tuple[dict[fx.Node, fx.Node], dict[str, float]]


def _bind(
    pattern: Pattern, want: fx.Node, have: Any, nodes: dict[fx.Node, fx.Node], literals: dict[str, float]
) -> _Bound | None:
    """Extend a partial match so that `want` is `have`; None when they differ."""
    if not isinstance(have, fx.Node):
        return None
    if want in nodes:
        return (nodes, literals) if nodes[want] is have else None
    if want.op == "placeholder":
        return {**nodes, want: have}, literals
    if have.op != "call_function" or have.target is not want.target or len(have.args) != len(want.args):
        return None
    if have.kwargs.keys() != want.kwargs.keys():
        return None
    orders = [have.args]
    if want.target in _COMMUTATIVE and len(have.args) == 2:
        orders.append((have.args[1], have.args[0]))
    for args in orders:
        pairs = [*zip(want.args, args, strict=True), *((want.kwargs[k], have.kwargs[k]) for k in want.kwargs)]
        bound = _bind_all(pattern, pairs, {**nodes, want: have}, literals)
        if bound is not None:
            return bound
    return None


def _bind_all(
    pattern: Pattern,
    pairs: Sequence[tuple[Any, Any]],
    nodes: dict[fx.Node, fx.Node],
    literals: dict[str, float],
) -> _Bound | None:
    for want, have in pairs:
        bound = _bind_argument(pattern, want, have, nodes, literals)
        if bound is None:
            return None
        nodes, literals = bound
    return nodes, literals


def _bind_argument(
    pattern: Pattern, want: Any, have: Any, nodes: dict[fx.Node, fx.Node], literals: dict[str, float]
) -> _Bound | None:
    if isinstance(want, fx.Node):
        return _bind(pattern, want, have, nodes, literals)
    if isinstance(want, (list, tuple)):
        if not isinstance(have, (list, tuple)) or len(want) != len(have):
            return None
        return _bind_all(pattern, list(zip(want, have, strict=True)), nodes, literals)
    if isinstance(want, (int, float)) and not isinstance(want, bool) and want in pattern.literals:
        name = pattern.literals[want]
        if isinstance(have, (int, float)) and literals.get(name, have) == have:
            return nodes, {**literals, name: have}
        return None
    return (nodes, literals) if want == have else None


def example(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A meta tensor for `make_pattern`; a new one each time, because export merges equal ones."""
    return torch.empty(shape, dtype=dtype, device="meta")
