"""Load the compiled kernels and bind calls to them."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from tapeout.plugins.errors import EngineIncompatibleError

if TYPE_CHECKING:
    import torch


def _team_launcher() -> int:
    """Address of GOMP_parallel in the OpenMP runtime torch has loaded; 0 when there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "libgomp" in Path(path).name:
            launcher = ctypes.CDLL(path).GOMP_parallel
            return ctypes.cast(launcher, ctypes.c_void_p).value or 0
    return 0


class NativeLibrary:
    """The kernels of one loaded shared object.

    Calls of one library may run on several Python threads; each gets its own team.
    """

    def __init__(self, handle: ctypes.CDLL, threads: int) -> None:
        self._handle = handle
        self.threads = threads
        handle.tapeout_init.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        handle.tapeout_init.restype = None
        handle.tapeout_init(_team_launcher(), threads)

    def bind(self, kernel: str, *fields: int | float | torch.Tensor | None) -> Callable[[], None]:
        """A call of `kernel` with its argument block filled in, in the order of its C struct.

        A tensor stands for its address and is kept alive by the result. A float fills a double
        field, an int an int64_t one. Raises EngineIncompatibleError when the library lacks the
        kernel or takes another number of fields.
        """
        block = _pack(fields)
        try:
            function = getattr(self._handle, f"tapeout_{kernel}")
            expected = ctypes.c_int64.in_dll(self._handle, f"tapeout_{kernel}_args_bytes").value
        except (AttributeError, ValueError):
            raise EngineIncompatibleError(
                f"the engine's kernels have no {kernel!r}", hint="build the engine again with this tapeout"
            ) from None
        if expected != len(block):
            raise EngineIncompatibleError(
                f"the engine's kernel {kernel!r} takes {expected // 8} arguments, this tapeout passes "
                f"{len(block) // 8}",
                hint="build the engine again with this tapeout",
            )
        function.argtypes = [ctypes.c_void_p]
        function.restype = None
        memory = ctypes.create_string_buffer(block, len(block))
        call = partial(function, ctypes.c_void_p(ctypes.addressof(memory)))
        call.keep_alive = (memory, fields)  # type: ignore[attr-defined]
        return call


def _pack(fields: Sequence[int | float | torch.Tensor | None]) -> bytes:
    parts = []
    for value in fields:
        if value is None:
            parts.append(struct.pack("<q", 0))
        elif isinstance(value, float):
            parts.append(struct.pack("<d", value))
        elif isinstance(value, int):
            parts.append(struct.pack("<q", value))
        else:
            parts.append(struct.pack("<q", value.data_ptr()))
    return b"".join(parts)


def load_native(so_bytes: bytes, threads: int | None = None) -> NativeLibrary:
    """Load a shared object made by `compile_native`.

    `threads` (default: torch's setting) bounds the OpenMP team; it should equal torch's, for
    the two share one team. Loading the same bytes for the same thread count again gives the
    same library. Raises EngineIncompatibleError when the object cannot be loaded here.
    """
    import torch  # brings the OpenMP runtime that is borrowed

    return _load(so_bytes, torch.get_num_threads() if threads is None else threads)


@cache
def _load(so_bytes: bytes, threads: int) -> NativeLibrary:
    descriptor = os.memfd_create("tapeout-native", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(so_bytes)
    try:
        handle = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        os.close(descriptor)
        raise EngineIncompatibleError(
            f"the engine's CPU kernels cannot be loaded on this machine: {error}",
            hint="build the engine on this machine, or for its CPU",
        ) from None
    # The descriptor stays open: the loader knows objects by path, and a reused number would
    # give the next caller this object instead of its own.
    return NativeLibrary(handle, threads)
