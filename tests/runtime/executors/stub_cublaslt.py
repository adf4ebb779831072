"""A libcublasLt on host memory, compiled from stub_cublaslt.c; and its calls as nodes of a fake graph."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

from fake_cuda import FakeCuda, Launched

SYMBOL = "cublasLtMatmul"  # of a call among launches; its values are the words of CALL
CALL = (
    "m", "n", "k", "lda", "ldb", "ldc", "ldd", "a", "b", "c", "bias", "d", "algorithm", "wrong",
)  # fmt: skip
_Words = ctypes.c_int64 * len(CALL)


def compile_stub(folder: Path, major: int = 13, **macros: int) -> Path:
    """The library, named as the loader looks for it; `macros` as VERSION=130100."""
    path = folder / f"libcublasLt.so.{major}"
    source = Path(__file__).with_name("stub_cublaslt.c")
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    command = [sys.executable, "-m", "ziglang", "cc", "-O1", "-shared", "-fPIC", *defined]
    subprocess.run([*command, "-o", str(path), str(source)], check=True)
    return path


def capture_calls(library: ctypes.CDLL, cuda: FakeCuda) -> Any:
    """Put calls among the launches that `cuda` captures, or run them where it does not capture. Keep what is
    returned as long as they come."""

    def take(call: int) -> None:
        words = tuple(_Words.from_address(call))
        launched = Launched(SYMBOL, (1, 1, 1), 0, 0, words, (), overlap=False)
        if cuda._recording is not None:
            cuda._recording.append(launched)
        else:
            cuda.launched_outside.append(launched)
            cuda.on_launch(launched)

    hook = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(take)
    library.stub_hook(hook)
    return hook


def kernel_of(launched: Launched) -> tuple[Any, ...]:
    """What decides which kernel a call loads: its shape and its algorithm."""
    call = dict(zip(CALL, launched.values, strict=True))
    return tuple(call[name] for name in ("m", "n", "k", "algorithm"))


def compute(library: ctypes.CDLL, launched: Launched) -> None:
    """Run a captured call."""
    words = _Words(*(int(v) for v in launched.values))
    library.stub_compute(ctypes.byref(words))
