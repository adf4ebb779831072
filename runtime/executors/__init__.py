"""Executors: one folder per target, chosen by the engine. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tapeout.plugins.errors import UsageError
from tapeout.plugins.native.host import detect_host
from tapeout.runtime.engine.reader import Engine
from tapeout.runtime.engine.target import check_target

if TYPE_CHECKING:
    from tapeout.runtime.executors.cpu import CpuExecutor

__all__ = ["load_executor"]


def load_executor(
    engine: Engine,
    *,
    num_pages: int,
    threads: int | None = None,
    release_weights: bool = False,
    max_buckets: int = 64,
) -> CpuExecutor:
    """The executor of the engine's target, ready to replay; imports what that target needs.

    `num_pages` pages of KV cache. `threads` for kernels (None: the library's default).
    `release_weights` trades speed for memory: no weight stays in memory after its record.
    `max_buckets` bound row counts are kept. Raises CapacityError when memory is short,
    EngineIncompatibleError when the engine was built for another target.
    """
    check_target(engine, detect_host())
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UsageError(
            "cpu engines need torch, which is not installed", hint="pip install 'tapeout[cpu]'"
        ) from None
    from tapeout.runtime.executors.cpu import CpuExecutor

    return CpuExecutor(
        engine, num_pages=num_pages, threads=threads, release_weights=release_weights, max_buckets=max_buckets
    )
