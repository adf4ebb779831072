"""The bindings of cuBLASLt on a stand-in that computes on host memory (see stub_cublaslt.c)."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from stub_cublaslt import compile_stub

from tapeout.plugins.cuda import MATMUL_ARGS
from tapeout.plugins.errors import EngineIncompatibleError, TapeoutError
from tapeout.runtime.engine.launches import KernelArg, Matmul
from tapeout.runtime.executors.cuda import cublaslt
from tapeout.runtime.executors.cuda.cublaslt import Call, CublasLt, Library, check_matmul, library_for
from tapeout.runtime.executors.cuda.driver import Stream, open_device

ROWS, N, K = 5, 24, 16
RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_stub(tmp_path_factory.mktemp("cublaslt"))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`found(path, ...)`: the libraries of this machine, by the names of their files."""

    def put(*paths: Path) -> None:
        by_name = {path.name: str(path) for path in paths}
        monkeypatch.setattr(
            cublaslt, "_places", lambda file, wheel: [by_name[file]] if file in by_name else []
        )

    for cached in (cublaslt._load, library_for):
        cached.cache_clear()
    yield put
    for cached in (cublaslt._load, library_for):
        cached.cache_clear()


@pytest.fixture
def library(stub: Path, cuda: FakeCuda) -> Iterator[CublasLt]:
    open_device().make_current()
    with closing(CublasLt(Library(str(stub)))) as handle:
        yield handle
    counts = ctypes.CDLL(str(stub))
    assert (counts.stub_open_handles(), counts.stub_open_objects()) == (0, 0)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits, of values that bfloat16 holds exactly."""
    return np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16 & 0xFFFF


class Matrix:
    """Rows of small integers, apart from each other; what is between is NaN."""

    def __init__(self, rows: int, columns: int, row: int) -> None:
        self.values = RNG.integers(-3, 4, (rows, columns)).astype(np.float32)
        self._memory = np.full(rows * row + 16, 0x7FC0, np.uint16)
        offset = (-self._memory.ctypes.data % 32) // 2
        self.bits = self._memory[offset : offset + rows * row].reshape(rows, row)
        self.bits[:, :columns] = bfloat16(self.values)
        self.address, self.row, self.columns = self.bits.ctypes.data, row, columns

    def read(self) -> np.ndarray:
        return (self.bits[:, : self.columns].astype(np.uint32) << 16).view(np.float32)


@pytest.fixture
def call() -> Call:
    """A product with bias and addend; the matrices live as long as the test."""
    x, weight, out = Matrix(ROWS, K, K + 16), Matrix(N, K, K), Matrix(ROWS, N, N + 8)
    addend, bias, workspace = Matrix(ROWS, N, 48), Matrix(1, N, N), np.zeros(4096, np.uint8)
    made = Call(
        "bfloat16", ROWS, N, K, True, True, x.address, x.row, weight.address, out.address, out.row,
        addend.address, addend.row, bias.address, -(-workspace.ctypes.data // 256) * 256, 2048,
    )  # fmt: skip
    object.__setattr__(made, "matrices", (x, weight, out, addend, bias, workspace))
    return made


def run(library: CublasLt, call: Call, algorithm: str) -> None:
    with closing(Stream()) as stream:
        library.matmul(call, algorithm, stream)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("addend", [False, True])
def test_a_product(library: CublasLt, call: Call, cuda: FakeCuda, bias: bool, addend: bool) -> None:
    x, weight, out, more, vector, _ = call.matrices  # type: ignore[attr-defined]
    asked = replace(call, has_bias=bias, has_addend=addend)
    found = library.algorithms(asked, 8)
    assert [(a.version, a.workspace_bytes) for a in found] == [(130100, 0), (130100, 1024), (130100, 2048)]
    assert [len(bytes.fromhex(a.data)) for a in found] == [64] * 3
    before = cuda.capture_mode
    run(library, asked, found[1].data)
    assert cuda.capture_mode == before
    wanted = x.values @ weight.values.T + bias * vector.values[0] + addend * more.values
    np.testing.assert_array_equal(out.read(), wanted)
    assert (out.bits[:, N:] == 0x7FC0).all()


def test_rows_of_nan_stay_alone(library: CublasLt, call: Call) -> None:
    x, weight, out, more, vector, _ = call.matrices  # type: ignore[attr-defined]
    x.bits[3] = 0x7FC0
    run(library, call, library.algorithms(call, 2)[1].data)
    wanted = x.values @ weight.values.T + vector.values[0] + more.values
    np.testing.assert_array_equal(np.delete(out.read(), 3, 0), np.delete(wanted, 3, 0))
    assert np.isnan(out.read()[3]).all()


def test_what_the_workspace_allows(library: CublasLt, call: Call) -> None:
    assert [a.workspace_bytes for a in library.algorithms(replace(call, workspace_bytes=1024), 8)] == [
        0,
        1024,
    ]
    assert len(library.algorithms(call, 1)) == 1


def test_errors_say_what_was_done(library: CublasLt, call: Call) -> None:
    with pytest.raises(TapeoutError, match=r"cuBLASLt 13.1.0: MatrixLayout: CUBLAS_STATUS_INVALID_VALUE"):
        library.algorithms(replace(call, x_row=8), 1)
    unknown = bytes(64).hex()
    with pytest.raises(
        EngineIncompatibleError, match=r"checking the algorithm of a product \[5, 16\]"
    ) as told:
        library.check(call, unknown)
    assert "tapeout time" in str(told.value.hint)
    last = library.algorithms(call, 3)[2].data
    with pytest.raises(
        EngineIncompatibleError, match=r"2,048 bytes of workspace, expected 0 and at most 1,024"
    ):
        library.check(replace(call, workspace_bytes=1024), last)
    library.check(call, last)


def test_a_library_that_does_not_start(tmp_path: Path, cuda: FakeCuda) -> None:
    with pytest.raises(EngineIncompatibleError, match="opening the library: CUBLAS_STATUS_NOT_INITIALIZED"):
        CublasLt(Library(str(compile_stub(tmp_path, START_STATUS=1))))


class TestFinding:
    """Before anything is allocated."""

    def test_the_one_that_is_there(self, stub: Path, found: Callable[..., None]) -> None:
        found(stub)
        assert cublaslt.find_library().path == str(stub)
        assert library_for((130100,)).version == 130100

    def test_another_minor_version_warns(
        self, stub: Path, found: Callable[..., None], caplog: pytest.LogCaptureFixture
    ) -> None:
        found(stub)
        with caplog.at_level(logging.WARNING, "tapeout"):
            assert library_for((130100, 131000)).version == 130100
            library_for((130100, 131000))
        words = "the engine's products are for cuBLAS 13.1.0 and 13.10.0, this machine has 13.1.0: "
        (record,) = caplog.records  # once a process
        assert record.message.startswith(words)

    def test_none(self, found: Callable[..., None]) -> None:
        found()
        with pytest.raises(
            EngineIncompatibleError, match=r"needs libcublasLt 13.*which was not found"
        ) as told:
            library_for((130100,))
        wheel = "pip install 'nvidia-cublas==13.*'"
        assert told.value.hint == f"{wheel}, or build the engine with --tactics native"
        with pytest.raises(EngineIncompatibleError, match="libcublasLt was not found") as told:
            cublaslt.find_library()
        assert told.value.hint == wheel

    def test_another_major_version(self, stub: Path, found: Callable[..., None]) -> None:
        found(stub)
        words = r"needs libcublasLt 12 \(its products are for cuBLAS 12.9.1\), this machine has 13.1.0"
        with pytest.raises(EngineIncompatibleError, match=words) as told:
            library_for((120901,))
        assert "pip install 'nvidia-cublas-cu12==12.*'" in str(told.value.hint)

    def test_two_major_versions(self, found: Callable[..., None]) -> None:
        found()
        with pytest.raises(EngineIncompatibleError, match=r"12.9.1 and 13.1.0, expected one major"):
            library_for((120901, 130100))

    @pytest.mark.parametrize(
        ("major", "wheel", "folder"),
        [
            (13, "nvidia_cublas-13.1.0", "nvidia/cu13/lib"),
            (13, "nvidia_cublas-13.1.0", "nvidia/cublas/lib"),
            (12, "nvidia_cublas_cu12-12.9.1.4", "nvidia/cublas/lib"),
        ],
    )
    def test_the_wheels_comes_before_the_loaders(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, major: int, wheel: str, folder: str
    ) -> None:
        """Wherever in it the wheel keeps it; only the wheel of that major version is asked."""
        file, facts = f"libcublasLt.so.{major}", tmp_path / f"{wheel}.dist-info"
        facts.mkdir()
        name, _, version = wheel.partition("-")
        facts.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        facts.joinpath("RECORD").write_text(f"{folder}/libcublas.so.{major},,\n{folder}/{file},,\n")
        monkeypatch.syspath_prepend(tmp_path)
        found = list(cublaslt._places(file, cublaslt._WHEELS[major]))
        assert found == [str(tmp_path / folder / file), file]
        other = next(m for m in cublaslt.MAJORS if m != major)
        assert str(tmp_path) not in "".join(cublaslt._places(file, cublaslt._WHEELS[other]))

    def test_files_that_are_none(self, found: Callable[..., None], tmp_path: Path) -> None:
        other = tmp_path / "libcublasLt.so.13"
        other.write_bytes(b"text")
        found(other)
        with pytest.raises(EngineIncompatibleError, match="was not found"):
            library_for((130100,))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"dtype": "float16"}, "a product in 'float16', expected bfloat16"),
        ({"args": ()}, "a product with 0 arguments, expected 9"),
        ({"algorithm": "zz"}, "a product whose algorithm is no hex: 'zz'"),
        ({"algorithm": ""}, "a product whose algorithm has 0 bytes, expected 64"),
    ],
)
def test_stored_products(changes: dict[str, Any], words: str | None) -> None:
    args = (KernelArg("input", 0, "", 0),) * len(MATMUL_ARGS)
    good = Matmul("bfloat16", N, K, False, False, args, 1024, "00" * 64, 130100)
    assert check_matmul(replace(good, **changes)) == words
