"""Results on the device: filled with NaN before a run, the rows around them too, and compared afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapeout.runtime.tactic_timer.device import Memory, fill_words
from tapeout.runtime.tactic_timer.launching import Matrix, Shared, item_bytes
from tapeout.runtime.tactic_timer.pack import Output

POISON = 0xFFFFFFFF  # NaN in every floating-point type, -1 as an integer
_SLOTS = 4  # of a comparison: elements beyond tolerance, outside, largest error, NaN


class Comparison:
    """Compares results with those that are wanted, by the pack's kernel `compare`."""

    def __init__(self, outputs: Sequence[Output], memory: Memory, shared: Shared) -> None:
        self._outputs, self._memory, self._shared = outputs, memory, shared
        self._found_bytes = 4 * _SLOTS * len(outputs)
        self._found = memory.allocate(self._found_bytes, "results of comparing")

    def problem(self, got: Sequence[Matrix], wanted: Sequence[Matrix]) -> str | None:
        """What is wrong with the first result that is; None when nothing is.

        Both have memory for a row before and one behind.
        """
        fill_words(self._found, 0, self._found_bytes, self._shared.stream)
        for index, (output, mine, theirs) in enumerate(zip(self._outputs, got, wanted, strict=True)):
            start, rows = with_guards(mine)
            self._shared.tools.compare(
                start, with_guards(theirs)[0], mine.dtype, self._found + 4 * _SLOTS * index, mine.real, rows,
                mine.columns, mine.row_stride, output.absolute, output.relative,
            )  # fmt: skip
        found = self._memory.download(self._found, (len(got), _SLOTS), np.dtype(np.int32))
        told = map(_output_problem, self._outputs, got, found)
        return next(filter(None, told), None)


def poison(matrix: Matrix, shared: Shared) -> None:
    """Queue filling a result with NaN, with the row before it and the one behind it."""
    start, rows = with_guards(matrix)
    fill_words(start, POISON, rows * matrix.row_stride * item_bytes(matrix.dtype), shared.stream)


def with_guards(matrix: Matrix) -> tuple[int, int]:
    """Where the row before a result starts, and its padded rows with that one and the one behind."""
    return matrix.address - matrix.row_stride * item_bytes(matrix.dtype), matrix.padded + 2


def _output_problem(output: Output, matrix: Matrix, found: np.ndarray) -> str | None:
    bad, outside, bits, missing = found.tolist()
    elements = matrix.real * matrix.columns
    if missing:
        return f"output {output.name}: {missing} of {elements} elements are NaN or were not written"
    if bad:
        largest = float(np.array(bits, np.int32).view(np.float32))
        return (
            f"output {output.name}: {bad} of {elements} elements differ, by at most {largest:.3g} "
            f"(tolerance {output.absolute:g} + {output.relative:g} * |expected|)"
        )
    if outside:
        return f"output {output.name}: {outside} elements outside its rows were written"
    return None
