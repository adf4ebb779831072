"""Times of whole steps: a few layers in one graph, each op over operands of its own.

Layers have weights and a layer of the KV pool each, as in a model. Where a few of them fit into the L2
cache, the graph holds the step several times, over other weights each time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from tapeout.runtime.tactic_timer.device import Graph, Memory
from tapeout.runtime.tactic_timer.launching import Shared
from tapeout.runtime.tactic_timer.operands import Operands, layer_bytes, weight_bytes
from tapeout.runtime.tactic_timer.pack import Candidate, Pack, WholeStep
from tapeout.runtime.tactic_timer.plan_search import Plan
from tapeout.runtime.tactic_timer.timing import in_turns_us, rounds_of

_Key = tuple[tuple[int, int], ...]
_CACHES, _MAX_TURNS = 2, 8  # times the L2 cache that a graph reads; steps in a graph


class StepTimer:
    """Times plans of one whole step.

    Args:
        candidates: those that plans may name, by entry and candidate; the algorithms of their products
            are chosen.
    """

    def __init__(
        self, pack: Pack, step: WholeStep, memory: Memory, shared: Shared, l2_bytes: int,
        candidates: Mapping[int, Mapping[int, Candidate]],
    ) -> None:  # fmt: skip
        self._step, self._shared, self._candidates = step, shared, candidates
        self._uses = Counter(step.ops)
        entries = {index: pack.entries[index] for index in self._uses}
        read = sum(
            count * (weight_bytes(entries[index]) + layer_bytes(entries[index], entries[index].timing))
            for index, count in self._uses.items()
        )
        self._turns = min(_MAX_TURNS, max(1, math.ceil(_CACHES * l2_bytes / max(1, read))))
        self._operands = {}
        for index, entry in entries.items():
            copies = self._uses[index] * self._turns
            self._operands[index] = Operands(
                entry, entry.timing, memory, shared, guarded=False, copies=copies, layers=copies
            )
        self._outputs = {index: o.new_outputs() for index, o in self._operands.items()}
        self._pools = {index: o.new_pool() for index, o in self._operands.items()}
        self._ready: set[tuple[int, int]] = set()
        self._graphs: dict[_Key, Graph] = {}
        self._rounds = 0

    def compare(self, plan: Plan, rival: Plan) -> tuple[float, float]:
        """Microseconds of a step by either plan: medians of replays that take turns, rounded.

        Their graphs are kept until others are compared.
        """
        keys = [_key(plan), _key(rival)]
        for key in self._graphs.keys() - set(keys):
            self._graphs.pop(key).close()
        for key, wanted in zip(keys, (plan, rival), strict=True):
            if key not in self._graphs:
                self._graphs[key] = self._graph(wanted)
                self._graphs[key].replay()  # instructions and descriptors reach the device
        graphs = [self._graphs[key] for key in keys]
        if not self._rounds:  # plans take about as long
            self._rounds = rounds_of(sum(in_turns_us(graphs, 1, self._shared.stream)))
        first, second = in_turns_us(graphs, self._rounds, self._shared.stream)
        return round(first / self._turns, 3), round(second / self._turns, 3)

    def warm_up(self, plan: Plan, duration_us: float) -> None:
        """Keep the GPU busy for about so long: one that idled clocks low at first."""
        self.compare(plan, plan)
        graphs, spent = [self._graphs[_key(plan)]], 0.0
        while spent < duration_us:
            spent += max(10.0, *in_turns_us(graphs, 10, self._shared.stream)) * 10

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _graph(self, plan: Plan) -> Graph:
        for entry, number in plan.items():
            if (entry, number) not in self._ready:
                launches = self._candidates[entry][number].launches
                self._shared.kernels.load_all(launches.launches)
                self._operands[entry].warm_up(launches, self._outputs[entry])  # kernels of a library
                self._ready.add((entry, number))

        def launches_of_all() -> None:
            turns: Counter[int] = Counter()
            for entry in self._step.ops * self._turns:
                copy, turns[entry] = turns[entry], turns[entry] + 1
                launches = self._candidates[entry][plan[entry]].launches
                self._operands[entry].launch(launches, self._outputs[entry], self._pools[entry], copy, copy)

        return Graph(self._shared.stream, launches_of_all)


def _key(plan: Plan) -> _Key:
    return tuple(sorted(plan.items()))
