"""Compile many kernels at once, in processes that may stay for many calls."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from tapeout.plugins.cuda import KernelSpec
from tapeout.plugins.errors import CapacityError, TapeoutError
from tapeout.plugins.triton_aot.compile import CompiledKernel, cached_kernel, compile_kernel
from tapeout.plugins.triton_aot.digest import kernel_digest


class _Compilers:
    """Processes that compile kernels, and what they were asked for: a kernel is asked for once."""

    def __init__(self, workers: int) -> None:
        self.pool = _pool(workers)
        self._asked: dict[tuple[str, int], Future[CompiledKernel]] = {}

    def ask(self, digest: str, spec: KernelSpec, sm: int) -> Future[CompiledKernel]:
        """The kernel that is, or will be, compiled. Raises CapacityError when a process was killed."""
        if (digest, sm) not in self._asked:
            try:
                self._asked[digest, sm] = self.pool.submit(compile_kernel, spec, sm)
            except BrokenProcessPool as error:
                raise _killed() from error
        return self._asked[digest, sm]


#: The processes that `compilers` keeps.
_kept: ContextVar[_Compilers | None] = ContextVar("_kept", default=None)


@contextmanager
def compilers(workers: int = 0) -> Iterator[None]:
    """Keep the processes of `compile_all` for as long as the context lasts: starting them takes seconds.

    They start at once and get ready while the caller goes on. `workers`: 0 for one a core.
    """
    workers = workers or len(os.sched_getaffinity(0))
    with _started(workers) as kept:
        token = _kept.set(kept)
        try:
            yield
        finally:
            _kept.reset(token)


def compile_ahead(specs: Sequence[KernelSpec], sm: int) -> None:
    """Let the processes of `compilers` begin with kernels that `compile_all` will ask for; returns at once.

    What fails is told there. Outside of `compilers` nothing happens.
    """
    kept = _kept.get()
    if kept is not None:
        for digest, spec in {kernel_digest(spec): spec for spec in specs}.items():
            if cached_kernel(spec, sm) is None:
                kept.ask(digest, spec, sm)


def compile_all(
    specs: Sequence[KernelSpec],
    sm: int,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[CompiledKernel]:
    """Compile several kernels in `workers` processes (0: one a core); results in the order of specs.

    Equal specs are compiled once; inside `compilers` its processes do it. `progress` is told how many
    distinct kernels are done, those in the cache and those that failed among them, and how many are wanted.

    Raises what `compile_kernel` raises, for the first that fails; processes have put all others into the
    cache by then, so who can do without it does not wait for them again. Raises CapacityError when one of
    the processes is killed.
    """
    digests = [kernel_digest(spec) for spec in specs]
    unique = dict(zip(digests, specs, strict=True))
    cached = {digest: cached_kernel(spec, sm) for digest, spec in unique.items()}
    done = {digest: kernel for digest, kernel in cached.items() if kernel is not None}
    missing = {digest: spec for digest, spec in unique.items() if digest not in done}
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    kept = _kept.get()
    if missing:
        progress(len(done), len(unique))
    if missing and (kept is not None or workers > 1):
        with nullcontext(kept) if kept is not None else _started(workers) as processes:
            asked = {digest: processes.ask(digest, spec, sm) for digest, spec in missing.items()}
            for count, _ in enumerate(as_completed(asked.values()), start=len(done) + 1):
                progress(count, len(unique))
            done |= _results(asked)
    else:
        for digest, spec in missing.items():
            done[digest] = compile_kernel(spec, sm)
            progress(len(done), len(unique))
    return [done[digest] for digest in digests]


def _results(asked: Mapping[str, Future[CompiledKernel]]) -> dict[str, CompiledKernel]:
    """By digest; waits for all before it raises the first error."""
    done: dict[str, CompiledKernel] = {}
    failed: list[TapeoutError] = []
    for digest, kernel in asked.items():
        try:
            done[digest] = kernel.result()
        except BrokenProcessPool as error:
            raise _killed() from error
        except TapeoutError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    return done


@contextmanager
def _started(workers: int) -> Iterator[_Compilers]:
    made = _Compilers(workers)
    try:
        with _with_huge_pages(), _deaf_to_ctrl_c():
            for _ in range(workers):
                made.pool.submit(_get_ready)
        yield made
    finally:
        _end(made.pool)


def _end(pool: ProcessPoolExecutor) -> None:
    """Kernels that nobody waits for any more are not begun; on a second Ctrl-C none is finished either, where
    Python would compile at its exit whatever had been asked for."""
    try:
        pool.shutdown(cancel_futures=True)
    except BaseException:
        for process in multiprocessing.active_children():
            process.kill()
        raise


@contextmanager
def _with_huge_pages() -> Iterator[None]:
    """Processes that start meanwhile get memory in large pieces and keep what they free: the compiler takes
    and frees all the time, and so takes about a tenth less of processor time. Where the C library is another
    one, nothing changes; what the user says stays."""
    if "GLIBC_TUNABLES" in os.environ:
        yield
        return
    pieces = {"hugetlb": 1, "top_pad": 64 << 20, "trim_threshold": 1 << 30, "mmap_threshold": 1 << 30}
    os.environ["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{name}={value}" for name, value in pieces.items())
    try:
        yield
    finally:
        del os.environ["GLIBC_TUNABLES"]


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that start meanwhile hear no SIGINT, which a terminal sends to all of a group: one that died
    with a queue's lock would leave the others, and who waits for them, waiting. The parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pool(workers: int) -> ProcessPoolExecutor:
    # Spawned, not forked: the parent may hold torch's thread pool.
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _get_ready() -> None:
    """Import what the first kernel would import."""
    import triton.backends.nvidia.compiler
    import triton.compiler  # noqa: F401


def _killed() -> CapacityError:
    return CapacityError(
        "a process that compiles kernels was killed, most likely for want of memory",
        hint="close other programs, or allow fewer processors (taskset)",
    )
