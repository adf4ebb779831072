"""Executors: one folder per target, chosen by the engine. See README.md."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from tapeout.plugins.errors import UsageError
from tapeout.plugins.native.host import detect_host
from tapeout.runtime.engine.reader import Engine
from tapeout.runtime.engine.target import check_target
from tapeout.runtime.host_memory import available_host_bytes
from tapeout.runtime.laps import Laps

if TYPE_CHECKING:
    from tapeout.runtime.executors.cpu import CpuExecutor
    from tapeout.runtime.executors.cuda import CudaExecutor

__all__ = ["load_executor", "memory_left"]


def load_executor(
    engine: Engine,
    *,
    num_pages: int,
    host_pages: int = 0,
    threads: int | None = None,
    release_weights: bool = False,
    max_buckets: int = 64,
    laps: Laps | None = None,
) -> CpuExecutor | CudaExecutor:
    """The executor of the engine's target, ready to replay; imports what that target needs.

    `num_pages` pages of KV cache, and `host_pages` of its host tier. On `cpu`: `threads` for kernels
    (None: the library's default);
    `release_weights` trades speed for memory: no weight stays in memory after its record;
    `max_buckets` bound row counts are kept; `laps` gets the seconds of the parts. Raises CapacityError
    when memory is short, EngineIncompatibleError when the engine was built for another target,
    UsageError when a package it needs is not installed.
    """
    laps = laps or Laps()
    if is_cuda(engine):
        module = _cuda_module(engine)
        laps.lap("executor_import")
        return module.CudaExecutor(engine, num_pages=num_pages, host_pages=host_pages, laps=laps)
    check_target(engine, detect_host())
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UsageError(
            "cpu engines need torch, which is not installed", hint="pip install 'tapeout[cpu]'"
        ) from None
    from tapeout.runtime.executors.cpu import CpuExecutor

    laps.lap("executor_import")
    return CpuExecutor(
        engine,
        num_pages=num_pages,
        host_pages=host_pages,
        threads=threads,
        release_weights=release_weights,
        max_buckets=max_buckets,
        laps=laps,
    )


def memory_left(engine: Engine, *, strict_sku: bool = False) -> int:
    """Bytes free for the KV cache beside weights and activations, where the engine runs.

    Asked before anything is loaded: a machine that cannot run the engine at all is told here.

    Args:
        strict_sku: refuse another GPU model of the engine's compute capability, or a later CPU level
            than the engine's, which run it with tactics that were chosen for another machine.

    Raises:
        EngineIncompatibleError, UsageError: as `load_executor`.
        CapacityError: weights, arena and one page of KV cache alone are too much for the GPU.
    """
    if is_cuda(engine):
        return _cuda_module(engine).device_memory_left(engine, strict_sku=strict_sku)
    check_target(engine, detect_host(), strict_sku=strict_sku)
    weights = sum(info.size_bytes for info in engine.weights.values())
    return max(available_host_bytes() - weights - engine.program.arena_bytes, 0)


def is_cuda(engine: Engine) -> bool:
    return engine.manifest.target.startswith("cuda:")


def _cuda_module(engine: Engine) -> ModuleType:
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        raise UsageError(
            f"{engine.path} was built for {engine.manifest.target}: cuda engines need cuda-bindings, "
            "which is not installed",
            hint="pip install 'tapeout[cuda]'",
        ) from None
    from tapeout.runtime.executors import cuda as module

    return module
