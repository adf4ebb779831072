"""Weights made ahead: in order, within their memory, by several threads, with failures named."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tapeout.compiler.weight_stream as stream
from tapeout.compiler.weight_stream import made_ahead, recipe_costs
from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import TapeoutError


def refs(*rows: int) -> dict[str, WeightRef]:
    return {f"w{i}": WeightRef.of(TensorInfo(f"w{i}", "float32", (n, 4))) for i, n in enumerate(rows)}


def test_order_is_that_of_the_file_whoever_is_ready_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream.os, "cpu_count", lambda: 4)
    weights, threads = refs(9, 1, 1, 1, 9, 1), set()

    def read(name: str) -> np.ndarray:
        threads.add(threading.current_thread().name)
        time.sleep(0.02 if name == "w0" else 0.001)
        return np.full(weights[name].shape, int(name[1:]), np.float32)

    made = list(made_ahead(weights, read))
    assert [name for name, _ in made] == list(weights)
    assert all(
        (array == i).all() and array.shape == weights[f"w{i}"].shape for i, (_, array) in enumerate(made)
    )
    assert len(threads) > 1
    assert list(made_ahead({}, read)) == []


def test_nothing_is_begun_beyond_twice_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream.os, "cpu_count", lambda: 8)
    weights, begun = refs(*[4] * 12), []

    def read(name: str) -> np.ndarray:
        begun.append(name)
        return np.zeros(weights[name].shape, np.float32)

    for taken, (_, array) in enumerate(made_ahead(weights, read), start=1):
        time.sleep(0.005)
        assert len(begun) <= taken + 1  # the one that is held here, and one more
        del array


def test_costs_are_of_results_and_of_what_is_read_for_them() -> None:
    q, k = (WeightRef.of(TensorInfo(n, "float32", (8, 16))) for n in "qk")
    joined = WeightRef.concat([q, k])
    costs = recipe_costs({
        "plain": q,
        "cast": joined.cast("bfloat16"),
        "values": joined.quantize_rows("values"),
        "scales": joined.quantize_rows("scales"),  # small, but the whole source is read for it
    })  # fmt: skip
    source = 8 * 16 * 4
    assert costs == {"plain": source, "cast": source + source, "values": 256 + source, "scales": 64 + source}


def test_a_failure_names_the_weight_and_ends_the_threads(tmp_path: Path) -> None:
    def read(name: str) -> np.ndarray:
        return np.fromfile(tmp_path / name, np.float32)

    before = threading.active_count()
    with pytest.raises(TapeoutError, match="sources of weight w0 cannot be read"):
        list(made_ahead(refs(1, 1), read))
    made = made_ahead(refs(1, 1, 1), lambda name: np.zeros((1, 4), np.float32))
    next(made)
    made.close()
    assert threading.active_count() == before
