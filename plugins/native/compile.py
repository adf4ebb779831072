"""Compile the CPU kernels ahead of time with the pinned zig compiler.

The shared object is stored in the engine, so the machine that runs it needs no compiler.
Its bytes depend on the sources, the flags and the compiler's version only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tapeout.plugins.errors import TapeoutError, UnsupportedError

_PLUGINS = Path(__file__).resolve().parent.parent

#: Level to compiler target and architecture flags. glibc 2.28 is the oldest that wheels support.
_TARGETS = {
    "x86_64_v2": ("x86_64-linux-gnu.2.28", ("-march=x86_64_v2",)),
    "x86_64_v3": ("x86_64-linux-gnu.2.28", ("-march=x86_64_v3",)),
    "x86_64_v4": ("x86_64-linux-gnu.2.28", ("-march=x86_64_v4",)),
    "aarch64": ("aarch64-linux-gnu.2.28", ()),
}
LEVELS = tuple(_TARGETS)

#: No fast-math: NaN and infinity must survive. Contraction stays inside one expression.
_FLAGS = (
    "-std=gnu11", "-O3", "-ffp-contract=on", "-fno-math-errno", "-fno-sanitize=undefined",
    "-fno-stack-protector", "-fvisibility=hidden", "-fPIC", "-shared", "-g0", "-s", "-Wl,--build-id=none",
    "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-pass-failed", "-lm",
)  # fmt: skip


def _sources() -> tuple[list[Path], list[Path]]:
    """C files and headers below plugins/, sorted, relative to it."""
    found = [
        [p.relative_to(_PLUGINS) for p in sorted(_PLUGINS.glob(pattern))] for pattern in ("*/*.c", "*/*.h")
    ]
    return found[0], found[1]


def _target(level: str) -> tuple[str, tuple[str, ...]]:
    if level not in _TARGETS:
        raise UnsupportedError(f"CPU level {level!r} is not one of {', '.join(LEVELS)}")
    return _TARGETS[level]


def _compiler_version() -> str:
    if importlib.util.find_spec("ziglang") is None:
        raise UnsupportedError(
            "the package ziglang, which compiles the CPU kernels, is not installed",
            hint="install the build extra: pip install 'tapeout[build]'",
        )
    return importlib.metadata.version("ziglang")


def source_digest(level: str) -> str:
    """SHA-256 (hex) of everything that decides the compiled kernels of a level."""
    target, arch_flags = _target(level)
    digest = hashlib.sha256(repr((_compiler_version(), target, arch_flags, _FLAGS)).encode())
    for group in _sources():
        for path in group:
            text = (_PLUGINS / path).read_bytes()
            digest.update(f"\0{path.as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tapeout" / "zig"


@cache
def compile_native(level: str) -> bytes:
    """The kernels of `level` as the bytes of one ELF shared object.

    Raises UnsupportedError for an unknown level or without a compiler, TapeoutError when
    the compiler fails (its messages are in the error).
    """
    target, arch_flags = _target(level)
    _compiler_version()
    cache_dir = _cache_dir()
    cache_dir.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(cache_dir), "ZIG_LOCAL_CACHE_DIR": str(cache_dir)}
    with tempfile.TemporaryDirectory(prefix="tapeout-") as folder:
        output = Path(folder) / "native.so"
        # Run from plugins/ with relative names: no path of this machine reaches the object.
        command = [
            sys.executable, "-m", "ziglang", "cc", "-target", target, *arch_flags, *_FLAGS,
            *(path.as_posix() for path in _sources()[0]), "-Wl,-soname,native.so", "-o", str(output),
        ]  # fmt: skip
        done = subprocess.run(
            command, check=False, cwd=_PLUGINS, env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise TapeoutError(f"compiling the CPU kernels for {level} failed:\n{done.stderr.strip()}")
        return output.read_bytes()
