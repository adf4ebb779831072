"""cuBLASLt through ctypes: found and loaded only where an engine or a pack has a product for it.

Products are row-major, the library's matrices column-major: out^T [n, rows] = weight [n, k] @ x^T, for
which x, weight and out are read as they lie. Values of enums are those of cublasLt.h, cublas_api.h and
library_types.h of cuBLAS 12 and 13 (13.10 in the wheel nvidia-cublas).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from tapeout.plugins.cuda import MATMUL_ARGS, MatmulAlgorithm
from tapeout.plugins.errors import CapacityError, EngineIncompatibleError, TapeoutError
from tapeout.runtime.engine.launches import Matmul
from tapeout.runtime.executors.cuda.driver import Stream, relaxed_capture

MAJORS = (13, 12)  # that this file knows the enums of
ALGORITHM_BYTES = 64  # cublasLtMatmulAlgo_t: uint64_t data[8]
_WHEELS = {13: "nvidia-cublas", 12: "nvidia-cublas-cu12"}

_COMPUTE_32F = 68  # CUBLAS_COMPUTE_32F
_R_32F, _TYPES = 0, {"bfloat16": 14}  # cudaDataType: CUDA_R_32F, CUDA_R_16BF
_OP_T = 1  # CUBLAS_OP_T
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 7, 8  # CUBLASLT_MATMUL_DESC_*
_EPILOGUE_DEFAULT, _EPILOGUE_BIAS = 1, 4  # CUBLASLT_EPILOGUE_*
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEME_MASK = 1, 3  # CUBLASLT_MATMUL_PREF_*
_PREF_MIN_ALIGNMENTS = (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{A,B,C,D}_BYTES
_REDUCTION_COMPUTE_TYPE = 2  # CUBLASLT_REDUCTION_SCHEME_*: partial sums, if any, stay float32
_ALIGNMENT = 16  # bytes that operands' addresses are multiples of
_SUCCESS, _ALLOC_FAILED = 0, 3  # CUBLAS_STATUS_*

logger = logging.getLogger("tapeout")


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", _Algorithm), ("workspace_size", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


_P, _I, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
#: Parameters of the functions that return a status.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_P,),
    "cublasLtDestroy": (_P,),
    "cublasLtMatmulDescCreate": (_P, _I, _I),
    "cublasLtMatmulDescDestroy": (_P,),
    "cublasLtMatmulDescSetAttribute": (_P, _I, _P, _SIZE),
    "cublasLtMatrixLayoutCreate": (_P, _I, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_P,),
    "cublasLtMatmulPreferenceCreate": (_P,),
    "cublasLtMatmulPreferenceDestroy": (_P,),
    "cublasLtMatmulPreferenceSetAttribute": (_P, _I, _P, _SIZE),
    "cublasLtMatmulAlgoGetHeuristic": (_P, _P, _P, _P, _P, _P, _P, _I, _P, _P),
    "cublasLtMatmulAlgoCheck": (_P, _P, _P, _P, _P, _P, _P, _P),
    "cublasLtMatmul": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _SIZE, _P),
}


class Library:
    """A loaded libcublasLt. `version` is what it says: 131000 for 13.10.0."""

    def __init__(self, path: str) -> None:
        """Raises OSError where there is none."""
        self.path, self._library = path, ctypes.CDLL(path)
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        self._library.cublasLtGetStatusName.restype = ctypes.c_char_p
        self.version = int(self._library.cublasLtGetVersion())
        for name, parameters in _FUNCTIONS.items():
            getattr(self._library, name).argtypes = parameters

    @property
    def major(self) -> int:
        return self.version // 10000

    def call(self, name: str, *values: Any, doing: str) -> None:
        """Raises TapeoutError, saying what was being done, unless the function succeeds."""
        status = int(getattr(self._library, name)(*values))
        if status == _SUCCESS:
            return
        text = self._library.cublasLtGetStatusName(status)
        message = f"cuBLASLt {version_text(self.version)}: {doing}: {text.decode() if text else status}"
        raise CapacityError(message) if status == _ALLOC_FAILED else TapeoutError(message)


def version_text(version: int) -> str:
    """131000 as "13.10.0"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def find_library() -> Library:
    """Any libcublasLt this machine has, of the newest major version.

    Raises EngineIncompatibleError where there is none.
    """
    for major in MAJORS:
        if (library := _load(major)) is not None:
            return library
    raise EngineIncompatibleError("libcublasLt was not found", hint=_install(MAJORS[0]))


@cache
def library_for(versions: tuple[int, ...]) -> Library:
    """The library that algorithms of these versions are for; nothing is allocated.

    Raises EngineIncompatibleError where it is missing or of another major version. Another minor one
    is a warning in the log: the library checks every algorithm when an engine is loaded.
    """
    majors = sorted({version // 10000 for version in versions})
    wanted = " and ".join(map(version_text, versions))
    if len(majors) > 1:
        raise EngineIncompatibleError(
            f"the engine's products are for cuBLAS {wanted}, expected one major version",
            hint="time them again: tapeout build MODEL --pack FILE --tactics cublaslt, tapeout time FILE",
        )
    library = _load(majors[0])
    if library is None:
        others = [other for major in MAJORS if major != majors[0] and (other := _load(major))]
        have = f"this machine has {version_text(others[0].version)}" if others else "which was not found"
        raise EngineIncompatibleError(
            f"the engine needs libcublasLt {majors[0]} (its products are for cuBLAS {wanted}), {have}",
            hint=f"{_install(majors[0])}, or build the engine with --tactics native",
        )
    if any(version != library.version for version in versions):
        logger.warning(
            "the engine's products are for cuBLAS %s, this machine has %s: it runs where the library "
            "still knows their algorithms",
            wanted, version_text(library.version),
        )  # fmt: skip
    return library


def _install(major: int) -> str:
    return f"pip install '{_WHEELS.get(major, _WHEELS[MAJORS[0]])}=={major}.*'"


@cache
def _load(major: int) -> Library | None:
    """libcublasLt of a major version: from NVIDIA's wheel, else where the loader finds it."""
    for path in _places(f"libcublasLt.so.{major}", _WHEELS.get(major)):
        try:
            library = Library(path)
        except (OSError, AttributeError):  # none, or one without functions that are called here
            continue
        if library.major == major:
            return library
    return None


def _places(file: str, wheel: str | None) -> Iterator[str]:
    try:
        files = metadata.files(wheel) if wheel else None
    except metadata.PackageNotFoundError:
        files = None
    yield from (str(f.locate()) for f in files or () if f.name == file)
    yield file


@dataclass(frozen=True)
class Call:
    """A product with its addresses. Rows are elements between rows."""

    dtype: str
    rows: int
    n: int
    k: int
    has_bias: bool
    has_addend: bool
    x: int
    x_row: int
    weight: int
    out: int
    out_row: int
    addend: int
    addend_row: int
    bias: int
    workspace: int
    workspace_bytes: int

    @classmethod
    def of(cls, item: Matmul, rows: int, value: Callable[[Any], int | float]) -> Call:
        """The call of a launch at a bucket of `rows`; `value` looks an argument up."""
        values = {name: int(value(arg)) for name, arg in zip(MATMUL_ARGS, item.args, strict=True)}
        return cls(
            item.dtype, rows, item.n, item.k, item.bias, item.addend, **values,
            workspace_bytes=item.workspace_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class _Descriptors:
    """Opaque objects of one call: the operation, and the layouts of A, B, C and D."""

    operation: ctypes.c_void_p
    a: ctypes.c_void_p
    b: ctypes.c_void_p
    c: ctypes.c_void_p
    d: ctypes.c_void_p


class CublasLt:
    """A handle of the library in the current context, freed by `close`.

    Raises EngineIncompatibleError where it does not start with this driver, CapacityError for want of memory.
    """

    def __init__(self, library: Library) -> None:
        self._library, self._handle = library, ctypes.c_void_p()
        try:
            library.call("cublasLtCreate", ctypes.byref(self._handle), doing="opening the library")
        except CapacityError:
            raise
        except TapeoutError as error:
            hint = f"cuBLAS {library.major} needs a driver for CUDA {library.major}"
            raise EngineIncompatibleError(error.message, hint=hint) from None

    @property
    def version(self) -> int:
        return self._library.version

    def algorithms(self, call: Call, count: int) -> list[MatmulAlgorithm]:
        """What the library thinks fastest for a call, best first; at most `count`."""
        found, results = ctypes.c_int(), (_Heuristic * count)()
        with self._described(call) as made, self._preference(call) as preference:
            self._library.call(
                "cublasLtMatmulAlgoGetHeuristic", self._handle, made.operation, made.a, made.b, made.c,
                made.d, preference, count, ctypes.byref(results), ctypes.byref(found),
                doing=f"asking for algorithms of {_shape(call)}",
            )  # fmt: skip
        return [
            MatmulAlgorithm(bytes(result.algo).hex(), self.version, int(result.workspace_size))
            for result in results[: found.value]
            if result.state == _SUCCESS and result.workspace_size <= call.workspace_bytes
        ]

    def check(self, call: Call, algorithm: str) -> None:
        """Ask whether the library knows these 64 bytes, which it may not have written; nothing is queued.

        Raises EngineIncompatibleError where it cannot run the algorithm on this GPU.
        """
        data, result = _algorithm(algorithm), _Heuristic()
        with self._described(call) as made:
            try:
                self._library.call(
                    "cublasLtMatmulAlgoCheck", self._handle, made.operation, made.a, made.b, made.c, made.d,
                    ctypes.byref(data), ctypes.byref(result),
                    doing=f"checking the algorithm of {_shape(call)}",
                )  # fmt: skip
            except TapeoutError as error:
                raise EngineIncompatibleError(error.message, hint=_TIME_AGAIN) from None
        if result.state != _SUCCESS or result.workspace_size > call.workspace_bytes:
            raise EngineIncompatibleError(
                f"cuBLASLt {version_text(self.version)} does not run the algorithm of {_shape(call)}: status "
                f"{result.state}, {result.workspace_size:,} bytes of workspace, expected 0 and at most "
                f"{call.workspace_bytes:,}",
                hint=_TIME_AGAIN,
            )

    def matmul(self, call: Call, algorithm: str, stream: Stream) -> None:
        """Queue a product; while the stream is captured, nodes of its graph.

        The first time, the library loads kernels: make such a call once before it is captured. Kernels of
        the library wait for nothing by themselves; queued without programmatic dependent launch they start
        when all that was queued before has ended. The launch behind the call may overlap where the call
        ended with a kernel.
        """
        data = _algorithm(algorithm)
        alpha, beta = ctypes.c_float(1.0), ctypes.c_float(float(call.has_addend))
        c = call.addend if call.has_addend else call.out  # not read where beta is 0
        with self._described(call) as made, relaxed_capture():
            self._library.call(
                "cublasLtMatmul", self._handle, made.operation, ctypes.byref(alpha), call.weight, made.a,
                call.x, made.b, ctypes.byref(beta), c, made.c, call.out, made.d, ctypes.byref(data),
                call.workspace, call.workspace_bytes, int(stream.handle),
                doing=f"queueing {_shape(call)}",
            )  # fmt: skip
        stream.whole_before_next = not stream.ends_with_kernel()

    def close(self) -> None:
        if self._handle:
            self._library.call("cublasLtDestroy", self._handle, doing="closing the library")
            self._handle = ctypes.c_void_p()

    @contextmanager
    def _described(self, call: Call) -> Iterator[_Descriptors]:
        with ExitStack() as stack:

            def made(kind: str, *values: Any) -> ctypes.c_void_p:
                created = ctypes.c_void_p()
                self._library.call(f"cublasLt{kind}Create", ctypes.byref(created), *values, doing=kind)
                stack.callback(self._library.call, f"cublasLt{kind}Destroy", created, doing=kind)
                return created

            operation = made("MatmulDesc", _COMPUTE_32F, _R_32F)
            set_ = "cublasLtMatmulDescSetAttribute"
            self._set(set_, operation, _DESC_TRANSA, ctypes.c_int32(_OP_T))
            epilogue = _EPILOGUE_BIAS if call.has_bias else _EPILOGUE_DEFAULT
            self._set(set_, operation, _DESC_EPILOGUE, ctypes.c_uint32(epilogue))
            if call.has_bias:
                self._set(set_, operation, _DESC_BIAS_POINTER, ctypes.c_void_p(call.bias))
            kind = _TYPES[call.dtype]
            c_row = call.addend_row if call.has_addend else call.out_row
            yield _Descriptors(
                operation,
                made("MatrixLayout", kind, call.k, call.n, call.k),
                made("MatrixLayout", kind, call.k, call.rows, call.x_row),
                made("MatrixLayout", kind, call.n, call.rows, c_row),
                made("MatrixLayout", kind, call.n, call.rows, call.out_row),
            )

    @contextmanager
    def _preference(self, call: Call) -> Iterator[ctypes.c_void_p]:
        preference, doing = ctypes.c_void_p(), "preferences"
        self._library.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference), doing=doing)
        try:
            set_ = "cublasLtMatmulPreferenceSetAttribute"
            limit = ctypes.c_uint64(call.workspace_bytes)
            self._set(set_, preference, _PREF_MAX_WORKSPACE_BYTES, limit)
            scheme = ctypes.c_uint32(_REDUCTION_COMPUTE_TYPE)
            self._set(set_, preference, _PREF_REDUCTION_SCHEME_MASK, scheme)
            for which in _PREF_MIN_ALIGNMENTS:
                self._set(set_, preference, which, ctypes.c_uint32(_ALIGNMENT))
            yield preference
        finally:
            self._library.call("cublasLtMatmulPreferenceDestroy", preference, doing=doing)

    def _set(self, function: str, of: ctypes.c_void_p, which: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        self._library.call(function, of, which, ctypes.byref(value), size, doing=f"setting attribute {which}")


_TIME_AGAIN = "time its products with this library (tapeout time), or build with --tactics native"


def _algorithm(data: str) -> _Algorithm:
    return _Algorithm.from_buffer_copy(bytes.fromhex(data))


def _shape(call: Call) -> str:
    """For people."""
    return f"a product [{call.rows}, {call.k}] x [{call.n}, {call.k}]^T in {call.dtype}"


def check_matmul(item: Matmul) -> str | None:
    """What is wrong with a stored product; None when nothing is."""
    if item.dtype not in _TYPES:
        return f"a product in {item.dtype!r}, expected {' or '.join(_TYPES)}"
    if len(item.args) != len(MATMUL_ARGS):
        return f"a product with {len(item.args)} arguments, expected {len(MATMUL_ARGS)}"
    try:
        size = len(bytes.fromhex(item.algorithm))
    except ValueError:
        return f"a product whose algorithm is no hex: {item.algorithm[:20]!r}"
    if size != ALGORITHM_BYTES:
        return f"a product whose algorithm has {size} bytes, expected {ALGORITHM_BYTES}"
    return None
