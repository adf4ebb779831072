"""A region's values on the device: laid out as an arena has them, filled for one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tapeout.runtime.engine.launches import RangeLaunches, Segment
from tapeout.runtime.engine.program import View
from tapeout.runtime.executors.cuda.driver import relaxed_capture
from tapeout.runtime.tactic_timer.contents import fill, new_weight
from tapeout.runtime.tactic_timer.device import Memory, fill_words
from tapeout.runtime.tactic_timer.launching import (
    Bindings,
    Matrix,
    Shared,
    Workspace,
    item_bytes,
    queue_launches,
    warm_up_products,
)
from tapeout.runtime.tactic_timer.outputs import POISON
from tapeout.runtime.tactic_timer.pack import RegionBody, RegionCase, RegionValue, StepCase
from tapeout.runtime.tactic_timer.steps import ONE_PAGE, STALE, step_tensors
from tapeout.runtime.tensorrt.segments import ADDRESS_ALIGNMENT, LoadedSegments

#: Tactics of a region's ops, in their order.
Chain = Sequence[RangeLaunches]


class RegionMemory:
    """Inputs, weights, intermediate results and workspace of a region in one step.

    Every value has its own memory. Rows stand as an arena has them, because a segment reads and writes them
    there: padding rows are rows of the step, those of ids ask for row 0, as in an engine.

    Args:
        case: of the region, for its bucket. step: what it is run in.
        chains: all that are to be launched. copies: sets of weights.
        segment_bytes: memory that the segment works in.
    """

    def __init__(
        self, body: RegionBody, case: RegionCase, step: StepCase, memory: Memory, shared: Shared, *,
        chains: Sequence[Chain], copies: int, segment_bytes: int,
    ) -> None:  # fmt: skip
        self._body, self._case, self._memory, self._shared = body, case, memory, shared
        tensors = step_tensors(step, ONE_PAGE, max(case.rows, step.rows))
        self._step = {name: memory.upload(array, name) for name, array in tensors.items()}
        self._rows = {"T": (step.rows, case.rows), "R": (step.logit_rows, case.logit_rows)}
        self._values = {value.name: self.new_value(value) for value in body.values}
        for name in body.inputs:
            self._fill_input(name)
        self._weights = [
            {name: new_weight(operand, copy, memory, shared) for name, operand in body.weights.items()}
            for copy in range(copies)
        ]
        rows = [self._record_rows(index) for index in range(len(body.records))]
        ranges = [pair for chain in chains for pair in zip(chain, rows, strict=True)]
        self.workspace = Workspace.of(ranges, memory, shared.kernels, least_bytes=segment_bytes)

    def new_value(self, value: RegionValue) -> Matrix:
        """Memory of a value, filled with NaN, a row before and one behind it included."""
        real, padded = self._rows[str(value.shape[0])]
        row = value.row_elements * item_bytes(value.dtype)
        before = -(-row // ADDRESS_ALIGNMENT) * ADDRESS_ALIGNMENT
        size = before + (padded + 1) * row
        start = self._memory.allocate(size, "a value of a region")
        fill_words(start, POISON if value.dtype != "int32" else STALE, size, self._shared.stream)
        shape, address = tuple(int(d) for d in value.shape[1:]), start + before
        if not shape:  # a vector lies in one row
            return Matrix(address, value.dtype, 1, 1, real, padded, ())
        return Matrix(address, value.dtype, real, padded, math.prod(shape), value.row_elements, shape)

    def outputs(self) -> list[Matrix]:
        """Where the region's ops write what later ops read."""
        return [self._values[output.name] for output in self._body.outputs]

    def launch(self, chain: Chain, copy: int) -> None:
        """Queue our kernels for all ops, over one set of weights."""
        for index, launches in enumerate(chain):
            queue_launches(launches, self._bound(index, copy), self._shared)

    def warm_up(self, chain: Chain) -> None:
        """Load what a capture forbids to load: our kernels, and those of a library's products."""
        for index, launches in enumerate(chain):
            self._shared.kernels.load_all(launches.launches)
            warm_up_products(launches, self._bound(index, 0), self._shared)

    def enqueue(self, loaded: LoadedSegments, segment: Segment, outputs: Sequence[Matrix], copy: int) -> None:
        """Queue the segment over one set of weights; what follows waits for all of it, as after a library."""
        addresses = [
            *(self._values[tensor.name].address for tensor in segment.inputs),
            *(self._weights[copy][tensor.name].address for tensor in segment.weights),
            *(matrix.address for matrix in outputs),
        ]
        rows = {"T": self._case.rows, "R": self._case.logit_rows}
        with relaxed_capture():
            self._shared.stream.whole_before_next = True
            loaded.enqueue(0, segment.profile_at(rows), rows, addresses, int(self._shared.stream.handle))

    def _fill_input(self, name: str) -> None:
        operand, matrix = self._body.inputs[name], self._values[name]
        stream, content = self._shared.stream, operand.content
        if content.kind == "step":
            stream.copy(matrix.address, self._step[content.name], 4 * matrix.columns)
            return
        if name in self._row_ids():
            stream.zero(matrix.address, 4 * matrix.row_stride)  # an engine clears them ahead of every step
            operand = replace(operand, content=replace(content, high=self._rows["T"][0]))
        fill(matrix, operand, 0, self._shared)

    def _row_ids(self) -> set[str]:
        """Inputs that say which rows an op selects."""
        return {r.inputs[1].buffer for r in self._body.records if r.op == "select_rows"}

    def _record_rows(self, index: int) -> int:
        """Padded rows that a record's launches are made for."""
        return self._rows[str(self._body.records[index].outputs[0].shape[0])][1]

    def _bound(self, index: int, copy: int) -> Bindings:
        record = self._body.records[index]
        weights = [self._weights[copy][name] for name in record.weights if name]
        return Bindings(
            self._record_rows(index), list(map(self._window, record.inputs)), weights,
            list(map(self._window, record.outputs)), self._step, self.workspace, record.attrs,
        )  # fmt: skip

    def _window(self, view: View) -> Matrix:
        whole = self._values[view.buffer]
        address = whole.address + view.offset * item_bytes(view.dtype)
        shape = tuple(int(d) for d in view.shape[1:])
        return Matrix(
            address,
            view.dtype,
            whole.real,
            whole.padded,
            math.prod(shape),
            view.strides[0],
            shape,
            view.strides,
        )


def forget_padding(matrix: Matrix, shared: Shared) -> None:
    """Queue filling padding rows, and what pads rows, with NaN: a segment writes both, as it may."""
    item = item_bytes(matrix.dtype)
    row, own = matrix.row_stride * item, matrix.columns * item
    behind = matrix.address + matrix.real * row
    fill_words(behind, POISON, (matrix.padded - matrix.real) * row, shared.stream)
    for index in range(matrix.real if own < row else 0):
        shared.stream.fill(matrix.address + index * row + own, POISON & 0xFF, row - own)


def region_weight_bytes(body: RegionBody) -> int:
    """Size of one set of a region's weights."""
    return sum(math.prod(map(int, w.shape)) * item_bytes(w.dtype) for w in body.weights.values())
