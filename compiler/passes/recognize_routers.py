"""Recognize the routing in front of experts: from logits to the ids and weights of the chosen experts.

Models spell it with softmax, top-k, gather, scatter, masks and divisions in many orders. What lies
between the logits and the experts' arguments is run on random logits and compared with `moe_router` for
every way of routing that it knows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten
from tapeout.compiler.probe import Probe, Region, known_nodes, regions_above
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.moe_router.reference import moe_router
from tapeout.plugins.op import AttrValue

_STOPS = frozenset({aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default})
_ROWS = 96
_MOST_NODES = 60


@dataclass(frozen=True)
class _Routing:
    attrs: Mapping[str, AttrValue]
    bias: fx.Node | None


def recognize_routers(graph: Graph) -> int:
    """Returns the number of routers that became `tapeout::moe_router`.

    Raises UnsupportedError naming the layer whose routing is none that the op knows.
    """
    count = 0
    experts = graph.nodes(torch.ops.tapeout.moe_experts.default)
    if not experts:
        return 0
    weights = {n for n in graph.graph.find_nodes(op="placeholder") if graph.weight_name(n) is not None}
    known = known_nodes(graph) | weights
    probe = Probe(graph, torch.arange(_ROWS))
    for call in experts:
        ids, factors = call.args[1:3]
        found = next(_matches(graph, probe, ids, factors, known), None)
        if found is None:
            raise _unknown(call)
        region, routing = found
        logits = region.source
        values = tuple(routing.attrs.values())
        routed = graph.call(call, torch.ops.tapeout.moe_router.default, logits, routing.bias, *values)
        new = [graph.call(call, operator.getitem, routed, i) for i in range(2)]
        call.args = (call.args[0], *new, *call.args[3:])
        count += 1
    return count


def _matches(
    graph: Graph, probe: Probe, ids: fx.Node, factors: fx.Node, known: set[fx.Node]
) -> Iterator[tuple[Region, _Routing]]:
    """Regions between logits and both results, the largest first, with the routing they compute."""
    for region in reversed(
        regions_above([ids, factors], known, lambda n: n.target not in _STOPS, _MOST_NODES)
    ):
        source = region.source.meta.get("val")
        if isinstance(source, torch.Tensor) and source.is_floating_point() and source.dim() in (2, 3):
            routing = _routing(graph, probe, region, ids, factors)
            if routing is not None:
                yield region, routing


def _routing(graph: Graph, probe: Probe, region: Region, ids: fx.Node, factors: fx.Node) -> _Routing | None:
    """The routing a region computes; None when it is none of those that the op knows."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(probe.shape(region.source), generator=generator)
    given = {region.source: logits}
    operands = {
        n for node in region.nodes for n in node.all_input_nodes if graph.weight_name(n) in graph.weights
    }
    operands = {n for n in operands if graph.weight_name(n) not in graph.constants}
    experts = logits.shape[-1]
    for operand in operands:
        size = tuple(operand.meta["val"].shape)
        given[operand] = 0.3 * torch.randn(size, generator=generator)
    biases = [n for n in operands if tuple(n.meta["val"].shape)[-1:] == (experts,)]
    if len(biases) != len(operands) or len(biases) > 1:
        return None
    bias = biases[0] if biases else None
    try:
        want_ids, want = probe.value(ids, given), probe.value(factors, given).float()
    except (LookupError, RuntimeError):
        return None
    rows = logits.reshape(-1, experts)
    want_ids, want = want_ids.reshape(rows.shape[0], -1), want.reshape(rows.shape[0], -1)
    if want_ids.is_floating_point() or want_ids.shape != want.shape or int(want_ids.max()) >= experts:
        return None
    return _fit(rows, None if bias is None else given[bias].reshape(-1), want_ids, want, bias)


def _fit(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    want_ids: torch.Tensor,
    want: torch.Tensor,
    bias_node: fx.Node | None,
) -> _Routing | None:
    chosen = want_ids.shape[1]
    for attrs in _candidates(logits.shape[1], chosen):
        try:
            values: tuple[Any, ...] = tuple(attrs.values())
            ids, weights = moe_router(logits, bias, *values)
        except RuntimeError:
            continue  # more groups than there is room for
        if not torch.equal(ids.sort(-1).values.long(), want_ids.sort(-1).values.long()):
            continue
        got = weights.gather(1, ids.argsort(-1)) / want.gather(1, want_ids.argsort(-1))
        scale = 1.0 / float(got.mean())
        if torch.allclose(got * scale, torch.ones_like(got), rtol=2e-5, atol=2e-5):
            return _Routing({**attrs, "scale": round(scale, 5)}, bias_node)
    return None


def _candidates(experts: int, chosen: int) -> Iterator[dict[str, AttrValue]]:
    """Attributes of moe_router in its order; those of few groups first."""
    divisors = [g for g in range(2, experts // 2 + 1) if experts % g == 0]
    grouped = [(g, n, by) for g in divisors for n in range(1, g) for by in ("best_two", "best")]
    for groups, chosen_groups, by in [(1, 1, "best"), *grouped]:
        for scoring in ("softmax", "sigmoid", "softmax_of_chosen"):
            for normalize in (False, True):
                yield {
                    "chosen": chosen, "scoring": scoring, "groups": groups, "chosen_groups": chosen_groups,
                    "group_by": by, "normalize": normalize, "scale": 1.0,
                }  # fmt: skip


def _unknown(call: fx.Node) -> UnsupportedError:
    stack = call.meta.get("nn_module_stack") or {}
    where = [path for path, _ in stack.values()][-1:] or [call.name]
    return UnsupportedError(
        f"the routing in front of {where[0]} is none that moe_router knows",
        hint="supported are top-k of softmax or sigmoid scores, with a bias, groups and normalization; "
        "see plugins/moe_router/__init__.py",
    )
