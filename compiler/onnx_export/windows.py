"""Windows of values as reshapes, slices and transposes, without loss.

The IR reads a value through shape, strides and offset; ONNX knows no strides. All dimensions here
are those of one row: the leading dimension (T or R) stays in front of every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Reshape:
    """The row in another shape of as many elements."""

    shape: Dims


@dataclass(frozen=True)
class Slice:
    """Elements `[start, stop)` of one dimension of the row."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class Transpose:
    """Dimension i of the result is dimension `order[i]` of the row."""

    order: Dims


Step = Reshape | Slice | Transpose


def shape_after(step: Step, shape: Dims) -> Dims:
    """The row's shape once `step` was applied to a row of `shape`."""
    if isinstance(step, Reshape):
        return step.shape
    if isinstance(step, Transpose):
        return tuple(shape[i] for i in step.order)
    return (*shape[: step.axis], step.stop - step.start, *shape[step.axis + 1 :])


def window_steps(row: Dims, shape: Dims, strides: Dims, offset: int) -> tuple[Step, ...]:
    """The steps from a contiguous row of shape `row` to the window, few and in order.

    Args:
        row, shape: dimensions of the value's row and of the window's.
        strides, offset: in elements of the row.

    Raises:
        ValueError: elements overlap, repeat or skip in a way that slices cannot say.
    """
    direct = _slices_of_axes(row, shape, strides, offset)
    if direct is not None:
        return direct
    dims = sorted((-stride, i, size) for i, (size, stride) in enumerate(zip(shape, strides, strict=True)))
    nested = [(size, -negative) for negative, _, size in dims if size != 1]
    path = _Path(row)
    path.reshape((math.prod(row),))
    outer: Dims = ()
    length, remaining = math.prod(row), offset
    for depth, (size, stride) in enumerate(nested):
        # This dimension is `size` blocks of `stride` elements; the dimensions inside it must fit one block.
        inside = 1 + sum((n - 1) * s for n, s in nested[depth + 1 :])
        start = min(remaining, length - size * stride)
        if start < 0 or remaining - start + inside > stride:
            raise ValueError(
                f"dimension of {size} with stride {stride} is no run of blocks in {length} elements"
            )
        path.slice(len(outer), start, start + size * stride)
        path.reshape((*outer, size, stride))
        outer, length, remaining = (*outer, size), stride, remaining - start
    if not 0 <= remaining < length:
        raise ValueError(f"offset {offset} lies outside a row of {math.prod(row)} elements")
    path.slice(len(outer), remaining, remaining + 1)
    path.reshape(outer)
    kept = [i for _, i, size in dims if size != 1]
    path.transpose(tuple(kept.index(i) for i in sorted(kept)))
    path.reshape(shape)
    return tuple(path.steps)


def _slices_of_axes(row: Dims, shape: Dims, strides: Dims, offset: int) -> tuple[Step, ...] | None:
    """Slices alone, when the window has the row's own dimensions, only shorter."""
    own = tuple(math.prod(row[i + 1 :]) for i in range(len(row)))
    if strides != own or math.prod(row) == 0:
        return None
    path = _Path(row)
    for axis, (size, length, stride) in enumerate(zip(shape, row, own, strict=True)):
        start, offset = divmod(offset, stride)
        if start + size > length:
            return None
        path.slice(axis, start, start + size)
    return tuple(path.steps)


class _Path:
    """Collects steps and leaves out those that change nothing."""

    def __init__(self, row: Dims) -> None:
        self.steps: list[Step] = []
        self._shapes = [row]

    def reshape(self, shape: Dims) -> None:
        if self.steps and isinstance(self.steps[-1], Reshape):
            self.steps.pop()
            self._shapes.pop()
        self._add(Reshape(shape), shape != self._shapes[-1])

    def slice(self, axis: int, start: int, stop: int) -> None:
        self._add(Slice(axis, start, stop), (start, stop) != (0, self._shapes[-1][axis]))

    def transpose(self, order: Dims) -> None:
        self._add(Transpose(order), order != tuple(range(len(order))))

    def _add(self, step: Step, changes: bool) -> None:
        if changes:
            self.steps.append(step)
            self._shapes.append(shape_after(step, self._shapes[-1]))
