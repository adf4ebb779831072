"""Run a part of a traced graph on real numbers, to find out what it computes.

Hugging Face code spells one thing in many ways. Instead of one pattern for each spelling, a pass
cuts out the part that lies between one activation and one result, feeds it numbers, and compares
with what an op of the vocabulary would give. `known_nodes` are the values that follow from positions
and constants alone (tables of angles, masks, slopes); everything else is an activation or a weight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, from_numpy

_LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})


def known_nodes(graph: Graph) -> set[fx.Node]:
    """Nodes whose value follows from positions, sizes and constants, whatever tokens and weights are."""
    known: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            if node.name == "positions" or graph.weight_name(node) in graph.constants:
                known.add(node)
        elif node.op == "call_function" and (
            node.target is aten.sym_size.int
            or (getattr(node.target, "namespace", "") != "tapeout" and known.issuperset(node.all_input_nodes))
        ):
            known.add(node)
    return known


@dataclass(frozen=True)
class Region:
    """The nodes between `source` (not included) and the sinks (included), known ones left out."""

    source: fx.Node
    sinks: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]


def regions_above(
    sinks: Sequence[fx.Node], known: Collection[fx.Node], allowed: Callable[[fx.Node], bool], limit: int = 60
) -> list[Region]:
    """Regions that end at `sinks` and begin at one activation, the smallest first.

    A region begins at every node that all paths from activations and weights to the sinks run through.
    It grows as long as its nodes are `allowed`, up to `limit` of them.
    """
    inside: list[fx.Node] = []
    frontier = set(sinks)
    found = []
    while len(inside) < limit:
        latest = max(frontier)  # in graph order
        if latest.op != "call_function" or not allowed(latest):
            break
        frontier.remove(latest)
        inside.append(latest)
        frontier |= {n for n in latest.all_input_nodes if n not in known}
        if not frontier:
            break
        if len(frontier) == 1:
            (source,) = frontier
            found.append(Region(source, tuple(sinks), frozenset(inside)))
    return found


class Probe:
    """Values of a graph's nodes at given positions, with activations given by the caller.

    Everything is computed on the CPU; casts to 16-bit floats are left out, so that results show the
    formula and not its rounding.
    """

    def __init__(self, graph: Graph, positions: torch.Tensor) -> None:
        self._graph = graph
        self.rows = positions.shape[0]
        self._known: dict[fx.Node, Any] = {}
        for node in graph.graph.find_nodes(op="placeholder"):
            if node.name == "positions":
                self._known[node] = positions.reshape([1] * (node.meta["val"].dim() - 1) + [-1])

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The node's shape at this number of rows."""
        return tuple(self._size(s) for s in node.meta["val"].shape)

    def value(self, node: fx.Node, given: Mapping[fx.Node, torch.Tensor]) -> Any:
        """The node's value; raises LookupError when it follows from something that was not given."""
        local: dict[fx.Node, Any] = dict(given)
        return self._value(node, local)

    def _value(self, node: fx.Node, local: dict[fx.Node, Any]) -> Any:
        stack = [node]
        while stack:
            top = stack[-1]
            if top in local or top in self._known:
                stack.pop()
                continue
            missing = [
                n
                for n in top.all_input_nodes
                if n not in local and n not in self._known and top.target is not aten.sym_size.int
            ]
            if missing and top.op == "call_function":
                stack += missing
                continue
            stack.pop()
            local[top] = self._call(top, local)
        return local[node] if node in local else self._known[node]

    def _call(self, node: fx.Node, local: Mapping[fx.Node, Any]) -> Any:
        if node.op == "placeholder":
            name = self._graph.weight_name(node)
            if name not in self._graph.constants:
                raise LookupError(f"{node.name} is no constant")
            value = from_numpy(self._graph.constants[name])
            return value.float() if value.dtype in _LOW_PRECISION else value
        if node.target is aten.sym_size.int:
            source, dim = node.args
            return self._size(source.meta["val"].shape[dim])
        args, mapped = fx.map_arg(
            (node.args, node.kwargs), lambda n: local[n] if n in local else self._known[n]
        )
        kwargs = dict(mapped)
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        if kwargs.get("dtype") in _LOW_PRECISION:
            kwargs["dtype"] = torch.float32
        args = tuple(torch.float32 if isinstance(a, torch.dtype) and a in _LOW_PRECISION else a for a in args)
        assert callable(node.target)
        if node.target in (operator.getitem, operator.mul, operator.add, operator.sub):
            return node.target(*args)
        with torch.no_grad():
            return node.target(*args, **kwargs)

    def _size(self, size: int | torch.SymInt) -> int:
        """Every symbolic size of a graph before paging is a number of rows, or arithmetic on it."""
        if isinstance(size, int):
            return size
        (symbol,) = size.node.expr.free_symbols
        return int(size.node.expr.subs(symbol, self.rows))
