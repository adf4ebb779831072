"""Numerics before times: the reference kernel against torch's values, then candidates against it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from tapeout.plugins.cuda import MatmulAlgorithm
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.container import DTYPES
from tapeout.runtime.engine.launches import Matmul
from tapeout.runtime.executors.cuda.cublaslt import version_text
from tapeout.runtime.tactic_timer.device import Graph, Memory, fill_words
from tapeout.runtime.tactic_timer.launching import Matrix, Shared
from tapeout.runtime.tactic_timer.operands import Operands
from tapeout.runtime.tactic_timer.outputs import Comparison
from tapeout.runtime.tactic_timer.pack import CHECKED_LAYER, Candidate, Entry, Samples

_ALGORITHMS = 8  # of a product that are checked and timed: the library ranks them, roughly


class Checker:
    """Runs an entry's tactics in its step of checking. Operands stay for all candidates."""

    def __init__(self, entry: Entry, memory: Memory, shared: Shared) -> None:
        self._entry, self._memory, self._shared = entry, memory, shared
        self._operands = Operands(entry, entry.check, memory, shared, guarded=True, copies=1, layers=2)
        self._wanted, self._got = self._operands.new_outputs(), self._operands.new_outputs()
        self._wanted_pool, self._got_pool = self._operands.new_pool(), self._operands.new_pool()
        self._comparison = Comparison(entry.outputs, memory, shared)
        self._differing = memory.allocate(4, "the result of comparing caches")

    def reference_problem(self) -> str | None:
        """Run the reference; what is wrong with it (None: nothing). Comes before any candidate."""
        self._run(self._entry.reference, self._wanted, self._wanted_pool)
        for samples in self._entry.samples:
            if problem := self._sample_problem(samples):
                return f"{self._entry.reference.tactic}, the reference, differs from torch's: {problem}"
        problem = self._comparison.problem(self._wanted, self._wanted)
        # The other pool is as the step finds it: only what belongs to the step's rows may change.
        changed, allowed = self._pool_differences(0.0, 0.0), self._new_elements()
        if problem is None and changed > allowed:
            problem = f"{changed} elements of the KV cache changed, {allowed} belong to the step's rows"
        return None if problem is None else f"{self._entry.reference.tactic}, the reference: {problem}"

    def problem(self, candidate: Candidate) -> str | None:
        """Run a candidate on poisoned outputs; what is wrong with it, None when nothing is."""
        self._operands.fill_pool(self._got_pool)
        self._run(candidate, self._got, self._got_pool)
        if problem := self._comparison.problem(self._got, self._wanted):
            return problem
        cache = self._entry.cache
        if cache is not None and (count := self._pool_differences(cache.absolute, cache.relative)):
            return f"the KV cache differs from the reference's in {count} elements"
        return None

    def variants(self, candidate: Candidate) -> list[tuple[Candidate, MatmulAlgorithm | None]]:
        """The candidate, or where it has a product that wants an algorithm one for each that the library
        offers. Raises TapeoutError where the library has none or is not there."""
        launches = candidate.launches.launches
        products = [item for item in launches if isinstance(item, Matmul) and not item.algorithm]
        if not products:
            return [(candidate, None)]
        library = self._shared.products.library()
        found = library.algorithms(self._operands.call(products[0], self._got), _ALGORITHMS)
        if not found:
            raise TapeoutError(f"cuBLASLt {version_text(library.version)} has no algorithm for it")
        return [(with_algorithm(candidate, algorithm), algorithm) for algorithm in found]

    def _run(self, candidate: Candidate, outputs: Sequence[Matrix], pool: int) -> None:
        self._shared.kernels.load_all(candidate.launches.launches)
        self._operands.warm_up(candidate.launches, outputs)  # kernels of a library
        self._operands.poison(outputs)

        def launches() -> None:
            self._operands.launch(candidate.launches, outputs, pool, 0, CHECKED_LAYER)

        with closing(Graph(self._shared.stream, launches)) as graph:  # as engines run it
            graph.replay()
            self._shared.stream.wait()
        items = candidate.launches.launches
        if any(isinstance(i, Matmul) and a.kind == "output" for i in items for a in i.args):
            self._operands.poison_padding(outputs)

    def _pool_differences(self, absolute: float, relative: float) -> int:
        """Elements in which the two pools differ by more than that."""
        cache = self._entry.cache
        if cache is None:
            return 0
        fill_words(self._differing, 0, 4, self._shared.stream)
        elements = self._operands.pool_bytes() // DTYPES[cache.dtype][1]
        self._shared.tools.compare_cache(
            self._got_pool, self._wanted_pool, cache.dtype, self._differing, elements, absolute, relative
        )
        return int(self._memory.download(self._differing, (1,), np.dtype(np.int32))[0])

    def _new_elements(self) -> int:
        """Elements of the pool that belong to the step's rows."""
        cache = self._entry.cache
        return 0 if cache is None else self._entry.check.rows * 2 * cache.kv_heads * cache.head_dim

    def _sample_problem(self, samples: Samples) -> str | None:
        count = len(samples.rows) * len(samples.columns)
        numbers = self._shared.numbers[samples.start : samples.start + count]
        wanted = numbers.reshape(len(samples.rows), len(samples.columns)).astype(np.float64)
        if samples.output < 0:
            cache = self._entry.cache
            assert cache is not None
            got, name = self._pool_rows(samples), "the KV cache"
            tolerance = (cache.absolute, cache.relative)
        else:
            output = self._entry.outputs[samples.output]
            got, name = self._output_rows(samples), f"output {output.name}"
            tolerance = (output.absolute, output.relative)
        error = np.abs(got.astype(np.float64) - wanted)
        bad = ~(error <= tolerance[0] + tolerance[1] * np.abs(wanted))
        if not bad.any():
            return None
        row, column = (int(i) for i in np.argwhere(bad)[0])
        return (
            f"{name}: {int(bad.sum())} of {count} sampled elements; at row {samples.rows[row]}, column "
            f"{samples.columns[column]} got {got[row, column]:.7g}, expected {wanted[row, column]:.7g}"
        )

    def _output_rows(self, samples: Samples) -> np.ndarray:
        """Float32 [rows, columns] of the reference's result."""
        matrix = self._wanted[samples.output]
        vector = not matrix.shape
        rows = []
        for row in samples.rows:
            at = 0 if vector else row * matrix.row_stride
            values = self._download(matrix.address, at, matrix.columns, matrix.dtype)
            rows.append(values[[row]] if vector else values[list(samples.columns)])
        return np.stack(rows)

    def _pool_rows(self, samples: Samples) -> np.ndarray:
        """Float32 [rows, columns]: keys and values of single tokens in the reference's pool."""
        cache = self._entry.cache
        assert cache is not None
        tokens, dim = cache.tokens_per_page, cache.head_dim
        page_elements = 2 * cache.kv_heads * tokens * dim
        rows = []
        for row in samples.rows:
            page, slot = divmod(row, tokens)
            start = (page * self._operands.layers + CHECKED_LAYER) * page_elements
            values = self._download(self._wanted_pool, start, page_elements, cache.dtype)
            of_slot = values.reshape(2 * cache.kv_heads, tokens, dim)[:, slot].reshape(-1)
            rows.append(of_slot[list(samples.columns)])
        return np.stack(rows)

    def _download(self, address: int, start: int, count: int, dtype: str) -> np.ndarray:
        """`count` elements from element `start`, as float32."""
        at = address + start * DTYPES[dtype][1]
        if dtype == "bfloat16":  # the upper half of float32
            raw = self._memory.download(at, (count,), np.dtype(np.uint16))
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return self._memory.download(at, (count,), np.dtype(dtype)).astype(np.float32)


def with_algorithm(candidate: Candidate, algorithm: MatmulAlgorithm) -> Candidate:
    """The candidate with the algorithm in its product."""
    launches = tuple(
        replace(
            item,
            algorithm=algorithm.data,
            version=algorithm.version,
            workspace_bytes=algorithm.workspace_bytes,
        )
        if isinstance(item, Matmul)
        else item
        for item in candidate.launches.launches
    )
    return replace(candidate, launches=replace(candidate.launches, launches=launches))
