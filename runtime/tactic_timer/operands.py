"""An entry's operands on the device, made for one step, and the arguments of launches over them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tapeout.plugins.errors import EngineCorruptError
from tapeout.runtime.engine.container import DTYPES
from tapeout.runtime.engine.launches import KernelArg, Launch, Matmul, RangeLaunches
from tapeout.runtime.executors.cuda.cublaslt import Call
from tapeout.runtime.executors.cuda.driver import Stream
from tapeout.runtime.tactic_timer.device import SCRATCH_ALIGNMENT, Kernels, Memory, Products, fill_words
from tapeout.runtime.tactic_timer.pack import CHECKED_LAYER, Entry, Operand, StepCase
from tapeout.runtime.tactic_timer.steps import ONE_PAGE, STALE, num_pages, step_tensors, used_tokens
from tapeout.runtime.tactic_timer.tool_kernels import ToolKernels

POISON = 0xFFFFFFFF  # NaN in every floating-point type, -1 as an integer
_GUARD, _MULTIPLE = 16, 16  # elements behind a row; what rows are padded to in an arena
_PADDING_ROWS = 3
_SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}


@dataclass(frozen=True)
class Matrix:
    """An operand as rows on the device. A vector is one row.

    address: of the first element. real, padded: rows with values, and rows of the bucket.
    shape: behind the leading dimension. row_stride: in elements.
    """

    address: int
    dtype: str
    real: int
    padded: int
    columns: int
    row_stride: int
    shape: tuple[int, ...]

    def stride(self, dimension: int) -> int:
        """Elements between steps of a dimension of the operand."""
        if dimension == 0:
            return self.row_stride if self.shape else 1
        return math.prod(self.shape[dimension:])


@dataclass(frozen=True)
class Shared:
    """What a timing process has once: kernels, the library of products, stream, numbers of the pack."""

    kernels: Kernels
    tools: ToolKernels
    stream: Stream
    numbers: np.ndarray
    products: Products


class Operands:
    """Inputs, weights, step tensors, KV pool and workspace of an entry, filled for one step.

    Args:
        guarded: rows stand apart, with NaN between and around them; else they lie as in an arena.
        copies: sets of weights. layers: of the KV pool. A guarded one holds values in CHECKED_LAYER
            alone, and there only in places that the step finds filled.
    """

    def __init__(
        self, entry: Entry, case: StepCase, memory: Memory, shared: Shared, *,
        guarded: bool, copies: int, layers: int,
    ) -> None:  # fmt: skip
        self.entry, self.case, self._memory, self._shared = entry, case, memory, shared
        self._guarded, self.layers = guarded, layers
        cache = entry.cache
        page = ONE_PAGE if cache is None else cache.tokens_per_page
        self.steps = step_tensors(case, page, max(entry.rows, case.rows))
        self._step = {name: memory.upload(array, name) for name, array in self.steps.items()}
        self.inputs = [self._input(operand) for operand in entry.inputs]
        self.weights = [[self._weight(w, copy) for w in entry.weights] for copy in range(copies)]
        if cache is not None:
            used = used_tokens(case, page, self.steps["page_table"])
            used = used if guarded else np.full_like(used, page)
            self._used = [memory.upload(a, "page fill") for a in (used, np.zeros_like(used))]
        ranges = [entry.reference.launches, *(c.launches for c in entry.candidates if not c.reason)]
        self._workspace_bytes = _aligned(max(r.workspace_bytes for r in ranges))
        scratch = max(self._scratch_bytes(r) for r in ranges)
        self._workspace = memory.allocate(self._workspace_bytes + scratch, "the workspace")
        self._workspace_size = self._workspace_bytes + scratch

    def new_outputs(self) -> list[Matrix]:
        """Memory for results: with guards a row before and one behind, all of it still to be poisoned."""
        return [self._allocate(o.dtype, o.shape, guard_rows=self._guarded) for o in self.entry.outputs]

    def poison(self, outputs: Sequence[Matrix]) -> None:
        """Fill results, guards and workspace with NaN, and forget arrivals that a wrong candidate left."""
        for matrix in outputs:
            start, rows = self.guards(matrix)
            fill_words(start, POISON, rows * matrix.row_stride * _item(matrix.dtype), self._shared.stream)
        fill_words(self._workspace, POISON, self._workspace_size, self._shared.stream)
        fill_words(self._step["arrivals"], 0, self.steps["arrivals"].nbytes, self._shared.stream)

    def guards(self, matrix: Matrix) -> tuple[int, int]:
        """Where an output's memory starts, and its rows with those of the guards."""
        if not self._guarded:
            return matrix.address, matrix.padded
        return matrix.address - matrix.row_stride * _item(matrix.dtype), matrix.padded + 2

    def pool_bytes(self) -> int:
        """Size of a KV pool; 0 for ops that use none."""
        return self.layers * layer_bytes(self.entry, self.case)

    def new_pool(self) -> int:
        """Memory of a KV pool, filled as the step finds it; 0 for ops that use none."""
        if self.entry.cache is None:
            return 0
        pool = self._memory.allocate(self.pool_bytes(), "the KV cache")
        self.fill_pool(pool)
        return pool

    def fill_pool(self, pool: int) -> None:
        """Queue making a pool what it is before the step: NaN where no token is cached."""
        cache = self.entry.cache
        if cache is None:
            return
        for layer in range(self.layers):
            used = self._used[self._guarded and layer != CHECKED_LAYER]
            self._shared.tools.fill_cache(
                pool, cache.dtype, used, num_pages(self.case, cache.tokens_per_page), 2 * cache.kv_heads,
                cache.tokens_per_page, cache.head_dim, self.layers, layer, cache.seed, cache.factor,
            )  # fmt: skip

    def launch(
        self, launches: RangeLaunches, outputs: Sequence[Matrix], pool: int, copy: int, layer: int
    ) -> None:
        """Queue a tactic's launches over one set of weights and one layer of a pool."""
        for item in launches.launches:
            if isinstance(item, Matmul):
                call = self.call(item, outputs, copy)
                self._shared.products.library().matmul(call, item.algorithm, self._shared.stream)
                continue
            pairs = [self._argument(a, outputs, pool, copy, layer) for a in item.args]
            x, y, z = (dim.blocks(self.entry.rows) for dim in item.grid)
            self._shared.kernels.launch(
                item.kernel, (x, y, z), [value for value, _ in pairs], [type_ for _, type_ in pairs],
                self._workspace + self._workspace_bytes,
            )  # fmt: skip

    def warm_up(self, launches: RangeLaunches, outputs: Sequence[Matrix]) -> None:
        """Run products once, that the library loads its kernels outside a capture; results are garbage."""
        for item in launches.launches:
            if isinstance(item, Matmul):
                call = self.call(item, outputs, 0)
                self._shared.products.library().matmul(call, item.algorithm, self._shared.stream)

    def call(self, item: Matmul, outputs: Sequence[Matrix], copy: int) -> Call:
        """A product over one set of weights, with its addresses."""
        return Call.of(item, self.entry.rows, lambda arg: self._argument(arg, outputs, 0, copy, 0)[0])

    def poison_padding(self, outputs: Sequence[Matrix]) -> None:
        """Fill the padding rows of results with NaN: a product may write them, as an arena has them."""
        for matrix in outputs:
            row, item = matrix.row_stride * _item(matrix.dtype), _item(matrix.dtype)
            for index in range(matrix.real, matrix.padded):
                start = matrix.address + index * row
                fill_words(start, POISON, matrix.columns * item, self._shared.stream)

    # ---- making operands --------------------------------------------------------------------

    def _rows(self, symbol: int | str) -> tuple[int, int]:
        """(real, padded) rows behind a leading dimension."""
        real = {"T": self.case.rows, "R": self.case.logit_rows}[str(symbol)]
        return real, self.entry.rows if symbol == self.entry.symbol else real + _PADDING_ROWS

    def _allocate(self, dtype: str, shape: tuple[int | str, ...], guard_rows: bool = False) -> Matrix:
        real, padded = self._rows(shape[0])
        rest = tuple(int(d) for d in shape[1:])
        if not rest:  # a vector lies in one row
            return self._matrix(dtype, 1, 1, real, padded, rest, guard_rows)
        return self._matrix(dtype, real, padded, math.prod(rest), math.prod(rest), rest, guard_rows)

    def _matrix(
        self, dtype: str, real: int, padded: int, columns: int, wide: int, rest: tuple[int, ...],
        guard_rows: bool,
    ) -> Matrix:  # fmt: skip
        guard = _GUARD if self._guarded else 0
        stride = -(-(wide + guard) // _MULTIPLE) * _MULTIPLE
        size = (padded + 2 * guard_rows) * stride * _item(dtype)
        address = self._memory.allocate(size, "an operand")
        fill_words(address, POISON if dtype != "int32" else STALE, size, self._shared.stream)
        return Matrix(
            address + guard_rows * stride * _item(dtype), dtype, real, padded, columns, stride, rest
        )

    def _input(self, operand: Operand) -> Matrix:
        content = operand.content
        if content.kind == "step":
            real, padded = self._rows(operand.shape[0])
            return Matrix(self._step[content.name], operand.dtype, 1, 1, real, padded, ())
        matrix = self._allocate(operand.dtype, operand.shape)
        self._fill(matrix, operand, 0)
        return matrix

    def _weight(self, operand: Operand, copy: int) -> Matrix:
        """Weights are contiguous; row 0 of a vector."""
        shape = tuple(int(d) for d in operand.shape)
        rows, columns = (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))
        address = self._memory.allocate(rows * columns * _item(operand.dtype), "weights")
        matrix = Matrix(address, operand.dtype, rows, rows, columns, columns, shape[1:])
        self._fill(matrix, operand, copy)
        return matrix

    def _fill(self, matrix: Matrix, operand: Operand, copy: int) -> None:
        """Copies beside the first hold other values of the same kind."""
        content, tools = operand.content, self._shared.tools
        seed = (content.seed + copy) & 0x7FFFFFFF
        rows, columns, stride = matrix.real, matrix.columns, matrix.row_stride
        if content.kind == "normal":
            tools.fill_normal(matrix.address, matrix.dtype, rows, columns, stride, seed, content.factor)
        elif content.kind == "integers":
            tools.fill_integers(matrix.address, rows, columns, stride, seed, content.high)
        elif content.kind == "stored" and matrix.dtype == "float32" and rows == 1:
            values = self._shared.numbers[content.start : content.start + columns]
            host = np.ascontiguousarray(values, np.float32)
            self._shared.stream.upload(matrix.address, host.ctypes.data, host.nbytes)
            self._shared.stream.wait()
        else:
            raise EngineCorruptError(
                f"the pack fills a {operand.dtype} operand with {content.kind!r}, which is unknown",
                hint="make the pack again with this version: tapeout build MODEL --pack FILE",
            )

    # ---- arguments --------------------------------------------------------------------------

    def _argument(
        self, arg: KernelArg, outputs: Sequence[Matrix], pool: int, copy: int, layer: int
    ) -> tuple[int | float, type]:
        """Value and type; see `tapeout.plugins.cuda.Arg` for kinds."""
        kind = arg.kind
        if kind in _SCALARS:
            return arg.value, _SCALARS[kind]
        pointers: Mapping[str, Sequence[Matrix]] = {
            "input": self.inputs,
            "weight": self.weights[copy],
            "output": outputs,
        }
        if kind in pointers:
            operands = pointers[kind]
            # A weight that is absent is never read.
            return (operands[arg.index].address if arg.index < len(operands) else 0), ctypes.c_void_p
        if kind in {"input_stride", "output_stride"}:
            matrix = pointers[kind.removesuffix("_stride")][arg.index]
            return matrix.stride(int(arg.value)), ctypes.c_int32
        if kind == "step":
            return (pool if arg.name == "kv_pool" else self._step[arg.name]), ctypes.c_void_p
        if kind == "workspace":
            return self._workspace + int(arg.value), ctypes.c_void_p
        numbers = {"layers": self.layers, "max_pages": self.case.max_pages}
        if kind == "attr":
            return (layer if arg.name == "layer" else int(self.entry.attrs[arg.name])), ctypes.c_int32
        if kind not in numbers:
            raise EngineCorruptError(
                f"the pack has an argument of kind {kind!r}, which is unknown",
                hint="make the pack again with this version: tapeout build MODEL --pack FILE",
            )
        return numbers[kind], ctypes.c_int32

    def _scratch_bytes(self, launches: RangeLaunches) -> int:
        return max(
            (
                self._shared.kernels.scratch_bytes(
                    item.kernel, math.prod(dim.blocks(self.entry.rows) for dim in item.grid)
                )
                for item in launches.launches
                if isinstance(item, Launch)
            ),
            default=0,
        )


def weight_bytes(entry: Entry) -> int:
    """Size of one set of the entry's weights."""
    return sum(math.prod(int(d) for d in w.shape) * _item(w.dtype) for w in entry.weights)


def layer_bytes(entry: Entry, case: StepCase) -> int:
    """Size of one layer of the step's KV pool; 0 for ops that use none."""
    cache = entry.cache
    if cache is None:
        return 0
    page = 2 * cache.kv_heads * cache.tokens_per_page * cache.head_dim * _item(cache.dtype)
    return num_pages(case, cache.tokens_per_page) * page


def _item(dtype: str) -> int:
    return DTYPES[dtype][1]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
