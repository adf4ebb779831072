"""A region at one bucket: is its segment right, and is it faster than the best of our kernels in a row?

Both run what the region computes over the same operands: our kernels one launch after the other, each reading
what the one before wrote, the segment as one call. So what is compared is what a step would run in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.launches import Segment
from tapeout.runtime.tactic_timer.device import Graph, Memory
from tapeout.runtime.tactic_timer.launching import Matrix, Shared
from tapeout.runtime.tactic_timer.outputs import Comparison, poison
from tapeout.runtime.tactic_timer.pack import RegionBody, RegionCase
from tapeout.runtime.tactic_timer.region_memory import (
    Chain,
    RegionMemory,
    forget_padding,
    region_weight_bytes,
)
from tapeout.runtime.tactic_timer.timing import calls_of, in_turns_us, rotated_copies, rounds_of
from tapeout.runtime.tensorrt.segments import LoadedSegments


class RegionChecker:
    """Runs a region in its step of checking: by plain kernels, which are right, and by its segment."""

    def __init__(
        self, body: RegionBody, case: RegionCase, reference: Chain, segment: Segment, loaded: LoadedSegments,
        memory: Memory, shared: Shared,
    ) -> None:  # fmt: skip
        self._reference, self._segment, self._loaded, self._shared = reference, segment, loaded, shared
        self._region = RegionMemory(
            body, case, case.check, memory, shared,
            chains=[reference], copies=1, segment_bytes=loaded.memory_bytes,
        )  # fmt: skip
        values = {value.name: value for value in body.values}
        self._wanted = self._region.outputs()
        self._got = [self._region.new_value(values[output.name]) for output in body.outputs]
        self._comparison = Comparison(body.outputs, memory, shared)

    def reference_problem(self) -> str | None:
        """Run the plain kernels; what is wrong with their result (None: nothing)."""
        self._region.warm_up(self._reference)
        self._run(lambda: self._region.launch(self._reference, 0), self._wanted)
        return self._comparison.problem(self._wanted, self._wanted)

    def problem(self) -> str | None:
        """Run the segment; what is wrong with its result, None when nothing is."""
        place(self._loaded, self._region, self._shared)
        self._enqueue()  # its kernels are made, and shapes worked out, outside a capture
        self._run(self._enqueue, self._got)
        for matrix in self._got:
            forget_padding(matrix, self._shared)
        return self._comparison.problem(self._got, self._wanted)

    def _enqueue(self) -> None:
        self._region.enqueue(self._loaded, self._segment, self._got, 0)

    def _run(self, work: Callable[[], None], outputs: Sequence[Matrix]) -> None:
        for matrix in outputs:
            poison(matrix, self._shared)
        with closing(Graph(self._shared.stream, work)) as graph:  # as engines run it
            graph.replay()
            self._shared.stream.wait()


class RegionTimer:
    """Times a region in its step of timing: two graphs of calls that rotate over the weights, in turns."""

    def __init__(
        self, body: RegionBody, case: RegionCase, own: Chain, segment: Segment, loaded: LoadedSegments,
        memory: Memory, shared: Shared, l2_bytes: int,
    ) -> None:  # fmt: skip
        self._own, self._segment, self._loaded, self._shared = own, segment, loaded, shared
        self._copies = rotated_copies(region_weight_bytes(body), l2_bytes)
        self._region = RegionMemory(
            body, case, case.timing, memory, shared,
            chains=[own], copies=self._copies, segment_bytes=loaded.memory_bytes,
        )  # fmt: skip
        self._outputs = self._region.outputs()

    def compare(self) -> tuple[float, float]:
        """Microseconds of the region by the segment and by our kernels, rounded, because they decide."""
        self._region.warm_up(self._own)
        place(self._loaded, self._region, self._shared)
        self._by_segment(1)
        with closing(Graph(self._shared.stream, lambda: self._by_own(self._copies))) as graph:
            in_turns_us([graph], 1, self._shared.stream)  # instructions and descriptors reach the device
            (once_us,) = in_turns_us([graph], 1, self._shared.stream)
        calls = calls_of(once_us / self._copies, self._copies)
        with ExitStack() as stack:
            graphs = [
                stack.enter_context(closing(Graph(self._shared.stream, partial(work, calls))))
                for work in (self._by_segment, self._by_own)
            ]
            once = sum(in_turns_us(graphs, 1, self._shared.stream))
            segment_us, own_us = in_turns_us(graphs, rounds_of(once), self._shared.stream)
        return round(segment_us / calls, 3), round(own_us / calls, 3)

    def _by_own(self, calls: int) -> None:
        for call in range(calls):
            self._region.launch(self._own, call % self._copies)

    def _by_segment(self, calls: int) -> None:
        for call in range(calls):
            self._region.enqueue(self._loaded, self._segment, self._outputs, call % self._copies)


def place(loaded: LoadedSegments, region: RegionMemory, shared: Shared) -> None:
    """Give the segment's contexts the region's workspace."""
    workspace = region.workspace
    loaded.place(workspace.address, workspace.size_bytes, int(shared.stream.handle))


def load_segment(segment: Segment, plan: bytes) -> LoadedSegments:
    """The segment alone.

    Raises EngineIncompatibleError where its package is missing or of another version, or refuses it here;
    TapeoutError for whatever else the package raises.
    """
    try:
        return LoadedSegments([segment], lambda blob: plan)
    except TapeoutError:
        raise
    except Exception as error:  # bindings raise what they like
        raise TapeoutError(f"{segment.package} {segment.version}: {type(error).__name__}: {error}") from error
