"""An entry's operands on the device, made for one step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tapeout.runtime.engine.launches import Matmul, RangeLaunches
from tapeout.runtime.executors.cuda.cublaslt import Call
from tapeout.runtime.tactic_timer.contents import fill, new_weight
from tapeout.runtime.tactic_timer.device import Memory, fill_words
from tapeout.runtime.tactic_timer.launching import (
    Bindings,
    Matrix,
    Shared,
    Workspace,
    item_bytes,
    product_call,
    queue_launches,
    warm_up_products,
)
from tapeout.runtime.tactic_timer.outputs import POISON, poison
from tapeout.runtime.tactic_timer.pack import CHECKED_LAYER, Entry, Operand, StepCase
from tapeout.runtime.tactic_timer.steps import ONE_PAGE, STALE, num_pages, step_tensors, used_tokens

_GUARD, _MULTIPLE = 16, 16  # elements behind a row; what rows are padded to in an arena
_PADDING_ROWS = 3


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
        self.weights = [
            [new_weight(w, copy, memory, shared) for w in entry.weights] for copy in range(copies)
        ]
        if cache is not None:
            used = used_tokens(case, page, self.steps["page_table"])
            used = used if guarded else np.full_like(used, page)
            self._used = [memory.upload(a, "page fill") for a in (used, np.zeros_like(used))]
        ranges = [entry.reference.launches, *(c.launches for c in entry.candidates if not c.reason)]
        self._workspace = Workspace.of([(r, entry.rows) for r in ranges], memory, shared.kernels)

    def new_outputs(self) -> list[Matrix]:
        """Memory for results: with guards a row before and one behind, all of it still to be poisoned."""
        return [self._allocate(o.dtype, o.shape, guard_rows=self._guarded) for o in self.entry.outputs]

    def poison(self, outputs: Sequence[Matrix]) -> None:
        """Fill results, guards and workspace with NaN, and forget arrivals that a wrong candidate left."""
        for matrix in outputs:
            poison(matrix, self._shared)
        fill_words(self._workspace.address, POISON, self._workspace.size_bytes, self._shared.stream)
        fill_words(self._step["arrivals"], 0, self.steps["arrivals"].nbytes, self._shared.stream)

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
        queue_launches(launches, self._bound(outputs, pool, copy, layer), self._shared)

    def warm_up(self, launches: RangeLaunches, outputs: Sequence[Matrix]) -> None:
        """See `warm_up_products`."""
        warm_up_products(launches, self._bound(outputs, 0, 0, 0), self._shared)

    def call(self, item: Matmul, outputs: Sequence[Matrix]) -> Call:
        """A product over the first set of weights, with its addresses."""
        return product_call(item, self._bound(outputs, 0, 0, 0))

    def _bound(self, outputs: Sequence[Matrix], pool: int, copy: int, layer: int) -> Bindings:
        attrs = {**self.entry.attrs, "layer": layer}
        return Bindings(
            self.entry.rows, self.inputs, self.weights[copy], outputs, self._step, self._workspace, attrs,
            pool, self.layers, self.case.max_pages,
        )  # fmt: skip

    def poison_padding(self, outputs: Sequence[Matrix]) -> None:
        """Fill the padding rows of results with NaN: a product may write them, as an arena has them."""
        for matrix in outputs:
            row, item = matrix.row_stride * item_bytes(matrix.dtype), item_bytes(matrix.dtype)
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
        size = (padded + 2 * guard_rows) * stride * item_bytes(dtype)
        address = self._memory.allocate(size, "an operand")
        fill_words(address, POISON if dtype != "int32" else STALE, size, self._shared.stream)
        return Matrix(
            address + guard_rows * stride * item_bytes(dtype), dtype, real, padded, columns, stride, rest
        )

    def _input(self, operand: Operand) -> Matrix:
        content = operand.content
        if content.kind == "step":
            real, padded = self._rows(operand.shape[0])
            return Matrix(self._step[content.name], operand.dtype, 1, 1, real, padded, ())
        matrix = self._allocate(operand.dtype, operand.shape)
        fill(matrix, operand, 0, self._shared)
        return matrix


def weight_bytes(entry: Entry) -> int:
    """Size of one set of the entry's weights."""
    return sum(math.prod(int(d) for d in w.shape) * item_bytes(w.dtype) for w in entry.weights)


def layer_bytes(entry: Entry, case: StepCase) -> int:
    """Size of one layer of the step's KV pool; 0 for ops that use none."""
    cache = entry.cache
    if cache is None:
        return 0
    page = 2 * cache.kv_heads * cache.tokens_per_page * cache.head_dim * item_bytes(cache.dtype)
    return num_pages(case, cache.tokens_per_page) * page
