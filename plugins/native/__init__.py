"""Native CPU kernels: compiled ahead of time, loaded without a compiler."""

from tapeout.plugins.native.compile import LEVELS, compile_native, source_digest
from tapeout.plugins.native.host import detect_host
from tapeout.plugins.native.library import NativeLibrary, load_native

#: Name of the library in an engine's kernels section.
NATIVE_KERNELS = "native.so"

__all__ = [
    "NATIVE_KERNELS",
    "LEVELS",
    "NativeLibrary",
    "compile_native",
    "detect_host",
    "load_native",
    "source_digest",
]
