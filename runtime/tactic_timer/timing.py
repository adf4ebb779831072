"""Times of tactics: replays of a graph of calls that rotate over the weights, as layers of a model do.

Activations stay in place: in a step, too, they come from the launch before and lie in the same arena.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import closing

from tapeout.runtime.executors.cuda.driver import Stream
from tapeout.runtime.tactic_timer.device import Graph, Memory, TimedEvents
from tapeout.runtime.tactic_timer.launching import Shared
from tapeout.runtime.tactic_timer.operands import Operands, layer_bytes, weight_bytes
from tapeout.runtime.tactic_timer.pack import Candidate, Entry

_CACHES = 2  # times the L2 cache that a rotation reads
_MAX_COPIES = 32  # small weights stay in the cache in a real step too
_FIRST_CALLS = 4
_CLOCK_US = 0.5  # step of the events' clock
_GRAPH_US, _MAX_CALLS = 200.0, 128  # of a replay: long beside the clock's step
_REPLAYS, _MIN_REPLAYS, _REPLAYS_US = 15, 5, 10_000.0
_HOPELESS = 4  # times the best: what a first replay must take to have lost
_ROUNDS, _MIN_ROUNDS, _ROUNDS_US = 9, 3, 10_000.0  # replays of each of two graphs that take turns


class Timer:
    """Times an entry's candidates in its step of timing."""

    def __init__(self, entry: Entry, memory: Memory, shared: Shared, l2_bytes: int) -> None:
        self._copies = rotated_copies(weight_bytes(entry) + layer_bytes(entry, entry.timing), l2_bytes)
        self._operands = Operands(
            entry, entry.timing, memory, shared, guarded=False, copies=self._copies, layers=self._copies
        )
        self._outputs, self._pool = self._operands.new_outputs(), self._operands.new_pool()
        self._shared = shared

    def time_us(self, candidate: Candidate, best_us: float) -> float:
        """Microseconds a call, the median of replays; rounded, because what is stored decides.

        A candidate whose first replay takes many times `best_us` a call has lost and is not timed
        further.
        """
        self._shared.kernels.load_all(candidate.launches.launches)
        self._operands.warm_up(candidate.launches, self._outputs)  # kernels of a library
        calls = max(_FIRST_CALLS, self._copies)
        with closing(self._graph(candidate, calls)) as graph:
            self._replays_us(graph, 1)  # instructions and descriptors reach the device
            call_us = max(_CLOCK_US, self._replays_us(graph, 1)) / calls
            if call_us > _HOPELESS * best_us:
                return round(call_us, 3)
            if call_us * calls >= _GRAPH_US:
                return round(self._median_us(graph, call_us * calls) / calls, 3)
        calls = calls_of(call_us, self._copies)
        with closing(self._graph(candidate, calls)) as graph:
            self._replays_us(graph, 1)
            return round(self._median_us(graph, call_us * calls) / calls, 3)

    def warm_up(self, candidate: Candidate, duration_us: float) -> None:
        """Keep the GPU busy for about so long: one that idled clocks low at first."""
        self._shared.kernels.load_all(candidate.launches.launches)
        with closing(self._graph(candidate, self._copies)) as graph:
            spent = 0.0
            while spent < duration_us:
                spent += max(10.0, self._replays_us(graph, 10) * 10)

    def _graph(self, candidate: Candidate, calls: int) -> Graph:
        def launches() -> None:
            for call in range(calls):
                turn = call % self._copies
                self._operands.launch(candidate.launches, self._outputs, self._pool, turn, turn)

        return Graph(self._shared.stream, launches)

    def _median_us(self, graph: Graph, replay_us: float) -> float:
        wanted = math.floor(_REPLAYS_US / max(replay_us, 1.0))
        return self._replays_us(graph, min(_REPLAYS, max(_MIN_REPLAYS, wanted)))

    def _replays_us(self, graph: Graph, count: int) -> float:
        """Median microseconds of `count` replays, queued without a pause between them."""
        with closing(TimedEvents(count)) as events:
            for index in range(count):
                events.around(index, graph.replay, self._shared.stream)
            return statistics.median(events.elapsed_us(index) for index in range(count))


def rotated_copies(size_bytes: int, l2_bytes: int) -> int:
    """Sets of operands of so many bytes that a rotation goes over, so that none is in the cache."""
    return min(_MAX_COPIES, max(1, math.ceil(_CACHES * l2_bytes / max(1, size_bytes))))


def calls_of(call_us: float, copies: int) -> int:
    """Calls in a graph: whole rotations, long beside the clock's step."""
    turns = math.ceil(min(_MAX_CALLS, _GRAPH_US / max(_CLOCK_US, call_us)) / copies)
    return max(1, turns) * copies


def rounds_of(once_us: float) -> int:
    """How often each of several graphs is replayed in turns, that take so long together."""
    return min(_ROUNDS, max(_MIN_ROUNDS, math.floor(_ROUNDS_US / max(1.0, once_us))))


def in_turns_us(graphs: Sequence[Graph], rounds: int, stream: Stream) -> list[float]:
    """Median microseconds of each graph's replays, queued in turns without a pause between them."""
    with closing(TimedEvents(len(graphs) * rounds)) as events:
        for index in range(len(graphs) * rounds):
            events.around(index, graphs[index % len(graphs)].replay, stream)
        times = [events.elapsed_us(index) for index in range(len(graphs) * rounds)]
    return [statistics.median(times[place :: len(graphs)]) for place in range(len(graphs))]
