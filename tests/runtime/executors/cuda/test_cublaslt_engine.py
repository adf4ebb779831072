"""An engine with products of cuBLASLt: what it loads, refuses and queues, on a stand-in for the library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from next_token import NextToken
from stub_cublaslt import CALL, SYMBOL, capture_calls, compile_stub, kernel_of

from tapeout.compiler.cuda_plan import _matmul
from tapeout.plugins.cuda import CudaTarget, MatmulAlgorithm, MatmulSpec
from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.plugins.linear.cublaslt import CublasLt
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.engine import Engine
from tapeout.runtime.engine.launches import RangeLaunches
from tapeout.runtime.executors import load_executor, memory_left
from tapeout.runtime.executors.cuda import CudaExecutor, cublaslt
from tapeout.runtime.step import StepInputs

Step = Callable[..., StepInputs]
PAGES = 8
ALGORITHM = MatmulAlgorithm(((0x7A9E).to_bytes(8, "little") + bytes([1]) + bytes(55)).hex(), 130100, 1024)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_stub(tmp_path_factory.mktemp("cublaslt"))


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The libraries of this machine: none, until a test adds one."""
    there: list[Path] = []
    monkeypatch.setattr(
        cublaslt, "_places", lambda file, wheel: [str(path) for path in there if path.name == file]
    )
    for cached in (cublaslt._load, cublaslt.library_for):
        cached.cache_clear()
    yield there
    for cached in (cublaslt._load, cublaslt.library_for):
        cached.cache_clear()


@pytest.fixture
def products(engine: Engine) -> Engine:
    """The engine with its linear_adds by cuBLASLt; skips one in float32, which has none."""
    table = engine.launches
    assert table is not None
    if engine.manifest.model.dtype == "float32":
        pytest.skip("float32 products are left to our own kernels")
    found = {k: s for k, s in engine.program.signatures.items() if s.op == "linear_add"}
    ranges = dict(table.ranges)
    for key, signature in found.items():
        (spec,) = CublasLt("linear_add").launches(signature, 16, CudaTarget(90, 132, 232448))
        assert isinstance(spec, MatmulSpec)
        item = _matmul(replace(spec, algorithm=ALGORITHM, workspace_bytes=1024))
        ranges[key] = (RangeLaunches(16, "cublaslt", 1024, (item,)),)
    engine.launches = replace(table, ranges=ranges, workspace_bytes=max(1024, table.workspace_bytes))
    assert found
    return engine


@pytest.mark.parametrize("last", ["KERNEL", "MEMSET"])
def test_products_are_queued_while_a_bucket_is_captured(
    last: str, products: Engine, cuda: FakeCuda, stub: Path, places: list[Path], step: Step
) -> None:
    cuda.node_types[SYMBOL] = getattr(cuda.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{last}")
    places.append(stub)
    library = ctypes.CDLL(str(stub))
    executor = load_executor(products, num_pages=PAGES)
    assert isinstance(executor, CudaExecutor)
    kept = capture_calls(library, cuda)
    cuda.on_launch = NextToken(executor, products)
    executor.admit(0, SamplingParams(temperature=0.0, max_tokens=8), np.zeros(0, np.int32))
    ids = executor.submit(step((0, [1, 2, 3], 0, [0]))).result().token_ids
    assert list(ids) == [4]
    calls = [dict(zip(CALL, x.values, strict=True)) for x in cuda.launched if x.symbol == SYMBOL]
    records = [r for r in products.program.records if r.op == "linear_add"]
    assert len(calls) == len(records) > 1
    for call, record in zip(calls, records, strict=True):
        types = products.program.signatures[record.signature]
        assert [call["m"], call["k"]] == list(types.weights[0].shape)
        # The bucket, not the step's three rows; behind the last attention its sampled rows.
        assert call["n"] == {"T": 4, "R": 1}[str(record.outputs[0].shape[0])]
        strides = [record.inputs[0].strides[0], record.inputs[1].strides[0], record.outputs[0].strides[0]]
        assert [call["ldb"], call["ldc"], call["ldd"]] == strides
        assert all(cuda.holds(int(call[name])) for name in "abcd")
        last_row = int(call["d"]) + 2 * (int(call["n"]) * int(call["ldd"]) - 1)
        assert cuda.holds(last_row)
        assert (call["bias"], call["algorithm"]) == (0, 1)
    # Each product has run once before it was captured, so that its kernel was there; layers share it.
    warmed = [kernel_of(launched) for launched in cuda.launched_outside]
    assert sorted(warmed) == sorted({kernel_of(x) for x in cuda.launched if x.symbol == SYMBOL})
    # Nothing starts before the step has been received, nor behind a product that does not end with a kernel.
    may = {kernel.symbol for kernel in products.launches.kernels if kernel.overlap}  # type: ignore[union-attr]
    waited_for = {"receive"} | ({SYMBOL} if last != "KERNEL" else set())
    pairs = [(x.symbol, y.overlap) for x, y in pairwise(cuda.launched) if y.symbol in may]
    assert {symbol for symbol, _ in pairs} > {SYMBOL, "receive"}
    assert all(overlap == (symbol not in waited_for) for symbol, overlap in pairs)
    # A bucket that was captured asks the library for nothing.
    kept_calls = len(cuda._graphs)
    library.stub_hook(None)
    again = executor.submit(step((0, [5, 6, 7], 3, [0]))).result().token_ids
    assert (list(again), len(cuda._graphs)) == ([8], kept_calls)
    executor.close()
    assert not any(cuda.open.values())
    assert library.stub_open_handles() == library.stub_open_objects() == 0
    assert kept is not None


def allocated(cuda: FakeCuda) -> dict[str, int]:
    return {kind: count for kind, count in cuda.open.items() if count}


def test_a_machine_without_the_library(products: Engine, cuda: FakeCuda) -> None:
    for load in (lambda: load_executor(products, num_pages=PAGES), lambda: memory_left(products)):
        with pytest.raises(EngineIncompatibleError, match="needs libcublasLt 13") as told:
            load()
        assert "pip install 'nvidia-cublas==13.*'" in str(told.value.hint)
    assert allocated(cuda) == {}


def test_a_machine_with_another_major_version(
    products: Engine, cuda: FakeCuda, places: list[Path], tmp_path: Path
) -> None:
    places.append(compile_stub(tmp_path, 12, VERSION=120901))
    with pytest.raises(EngineIncompatibleError, match=r"for cuBLAS 13.1.0\), this machine has 12.9.1"):
        load_executor(products, num_pages=PAGES)
    assert allocated(cuda) == {}


def test_a_library_that_does_not_start_leaves_nothing(
    products: Engine, cuda: FakeCuda, places: list[Path], tmp_path: Path
) -> None:
    places.append(compile_stub(tmp_path, START_STATUS=1))
    with pytest.raises(
        EngineIncompatibleError, match="opening the library: CUBLAS_STATUS_NOT_INITIALIZED"
    ) as told:
        load_executor(products, num_pages=PAGES)
    assert told.value.hint == "cuBLAS 13 needs a driver for CUDA 13"
    assert allocated(cuda) == {}


def test_algorithms_the_library_does_not_run_are_refused_when_loading(
    products: Engine, cuda: FakeCuda, stub: Path, places: list[Path]
) -> None:
    """Not in the step that first needs them: of any bucket, decode alone too."""
    places.append(stub)
    table = products.launches
    assert table is not None
    key, (row,) = next((k, r) for k, r in table.ranges.items() if r[0].tactic == "cublaslt")
    (good,) = row.launches
    bad: Any = replace(good, algorithm="00" * 64)  # type: ignore[type-var]
    small: Any = replace(good, workspace_bytes=512)  # type: ignore[type-var]
    cases = (
        ("ranges", 4, bad, r"checking the algorithm of a product \[8, "),
        ("ranges", 4, small, r"1,024 bytes of workspace, expected 0 and at most 512"),
        ("decode_ranges", 2, bad, r"checking the algorithm of a product \[4, "),
    )
    for kind, rows, item, told in cases:
        parts = (replace(row, max_rows=rows), replace(row, launches=(item,)))
        changed = {**getattr(table, kind), key: parts}
        products.launches = replace(table, **{kind: changed})
        with pytest.raises(EngineIncompatibleError, match=told) as error:
            load_executor(products, num_pages=PAGES)
        assert "--tactics native" in str(error.value.hint)
        assert allocated(cuda) == {}


def test_damaged_products(products: Engine, cuda: FakeCuda) -> None:
    table = products.launches
    assert table is not None
    key, (row,) = next((k, r) for k, r in table.ranges.items() if r[0].tactic == "cublaslt")
    broken: Any = replace(row.launches[0], algorithm="00")  # type: ignore[type-var]
    products.launches = replace(table, ranges={**table.ranges, key: (replace(row, launches=(broken,)),)})
    with pytest.raises(EngineIncompatibleError, match="algorithm has 1 bytes, expected 64"):
        load_executor(products, num_pages=PAGES)


def test_other_engines_load_no_library(
    engine: Engine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "_places", lambda file, wheel: pytest.fail("a library was looked for"))
    load_executor(engine, num_pages=PAGES).close()
