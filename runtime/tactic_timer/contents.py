"""Operands' contents, made on the device: numbers are a hash of seed, row and column, or the pack's own."""

from __future__ import annotations

import math

import numpy as np

from tapeout.plugins.errors import EngineCorruptError
from tapeout.runtime.tactic_timer.device import Memory
from tapeout.runtime.tactic_timer.launching import Matrix, Shared, item_bytes
from tapeout.runtime.tactic_timer.pack import Operand


def fill(matrix: Matrix, operand: Operand, copy: int, shared: Shared) -> None:
    """Queue filling an operand. Copies beside the first hold other values of the same kind."""
    content, tools = operand.content, shared.tools
    seed = (content.seed + copy) & 0x7FFFFFFF
    rows, columns, stride = matrix.real, matrix.columns, matrix.row_stride
    if content.kind == "normal":
        tools.fill_normal(matrix.address, matrix.dtype, rows, columns, stride, seed, content.factor)
    elif content.kind == "integers":
        tools.fill_integers(matrix.address, rows, columns, stride, seed, content.high)
    elif content.kind == "stored" and matrix.dtype == "float32" and rows == 1:
        values = shared.numbers[content.start : content.start + columns]
        host = np.ascontiguousarray(values, np.float32)
        shared.stream.upload(matrix.address, host.ctypes.data, host.nbytes)
        shared.stream.wait()
    else:
        raise EngineCorruptError(
            f"the pack fills a {operand.dtype} operand with {content.kind!r}, which is unknown",
            hint="make the pack again with this version: tapeout build MODEL --pack FILE",
        )


def new_weight(operand: Operand, copy: int, memory: Memory, shared: Shared) -> Matrix:
    """A weight in new memory: contiguous; a vector is one row."""
    shape = tuple(int(d) for d in operand.shape)
    rows, columns = (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))
    address = memory.allocate(rows * columns * item_bytes(operand.dtype), "weights")
    matrix = Matrix(address, operand.dtype, rows, rows, columns, columns, shape[1:])
    fill(matrix, operand, copy, shared)
    return matrix
