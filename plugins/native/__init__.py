"""Native CPU kernels: compiled ahead of time, loaded without a compiler."""

from tapeout.plugins.native.compile import LEVELS, compile_native, source_digest
from tapeout.plugins.native.host import detect_host
from tapeout.plugins.native.library import NativeLibrary, load_native

__all__ = ["LEVELS", "NativeLibrary", "compile_native", "detect_host", "load_native", "source_digest"]
