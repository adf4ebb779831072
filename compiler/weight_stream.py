"""Engine weights in file order, made ahead of their writer by several threads in bounded memory."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tapeout.model_defs.weights import Read, WeightRef, run_recipe
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.container import tensor_bytes

MAX_THREADS = 16  # what hashes and writes the results is one thread, and more could not keep it busier


def made_ahead(weights: Mapping[str, WeightRef], read: Read) -> Generator[tuple[str, np.ndarray], None, None]:
    """Every weight by name, C-contiguous, in the order of `weights`.

    Recipes run in threads (reading, casting and dequantizing leave the interpreter lock), as far
    ahead of the taker as memory allows: what is held or being made, sources included, stays
    within twice the largest weight, or within the one recipe that needs more than that.

    Args:
        read: called from several threads at once.

    Raises:
        TapeoutError: a recipe fails, or its sources cannot be read; the weight is named.
    """
    costs = recipe_costs(weights)
    largest = max((tensor_bytes(ref.dtype, ref.shape) for ref in weights.values()), default=0)
    budget_bytes, held_bytes = max(2 * largest, *costs.values(), 0), 0
    waiting: deque[tuple[str, Future[np.ndarray]]] = deque()
    pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="tapeout-recipe")
    try:
        for name, ref in weights.items():
            while waiting and held_bytes + costs[name] > budget_bytes:
                done = waiting[0][0]
                yield done, waiting.popleft()[1].result()  # in no variable, which would keep it alive
                held_bytes -= costs[done]
            waiting.append((name, pool.submit(_run, name, ref, read)))
            held_bytes += costs[name]
        while waiting:
            yield waiting[0][0], waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def recipe_costs(weights: Mapping[str, WeightRef]) -> dict[str, int]:
    """Bytes each recipe holds at most: its result and its largest source.

    A recipe does not tell how large its sources are, only what is left of them after its steps. Hence
    a source is as large as the largest piece that any recipe takes of it, in float32.
    """
    sources: dict[str, int] = {}
    for ref in weights.values():
        for name, size_bytes in _pieces(ref):
            sources[name] = max(sources.get(name, 0), size_bytes)
    return {
        name: tensor_bytes(ref.dtype, ref.shape)
        + (max(sources[s] for s in ref.source_names()) if ref.steps else 0)  # else it is the result
        for name, ref in weights.items()
    }


def _pieces(ref: WeightRef) -> Iterator[tuple[str, int]]:
    for source in ref.sources:
        if isinstance(source, str):
            yield source, 4 * math.prod(ref.shape)
        else:
            yield from _pieces(source)


def _run(name: str, ref: WeightRef, read: Read) -> np.ndarray:
    try:
        return run_recipe(ref, read)
    except OSError as error:  # not to be taken for a failure of the output
        raise TapeoutError(f"sources of weight {name} cannot be read: {error}") from error
