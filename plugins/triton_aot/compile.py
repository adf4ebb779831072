"""Compile Triton kernels to cubins without a GPU.

A cubin's bytes depend on the kernel's sources, its spec, the SM and Triton's version only:
line information, which would hold paths, is off. Compiled kernels are kept in
`$XDG_CACHE_HOME/tapeout/triton`, one file each.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapeout.plugins.cuda import KernelSpec
from tapeout.plugins.errors import CapacityError, TapeoutError, UnsupportedError
from tapeout.plugins.triton_aot.digest import kernel_digest, kernel_function

#: What every Triton kernel takes after its own arguments: global scratch, profiling scratch.
SCRATCH_TYPES = ("*i8", "*i8")

#: A kernel with this constexpr argument calls `overlap.wait` before it touches what other launches
#: write or read; it may then start before they end, on SMs that can. The compiler here fills it in.
OVERLAP = "OVERLAP"
_OVERLAP_SM = 90

#: The processes that `compilers` keeps.
_kept: ContextVar[ProcessPoolExecutor | None] = ContextVar("_kept", default=None)

_SUPPORTED_SMS = (80, 86, 89, 90, 100, 103, 120, 121)
_TYPES = {"i32", "i64", "u32", "u64", "fp32"}
_POINTERS = {f"*{t}" for t in ("i8", "u8", "i32", "i64", "u32", "u64", "fp16", "bf16", "fp32", "fp64")}


@dataclass(frozen=True)
class KernelResources:
    """What one block of a kernel occupies, as the assembler reports it.

    Attributes:
        registers: per thread. stack_bytes: local memory per thread; spilled registers show here.
    """

    registers: int
    stack_bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and what launching it takes.

    Attributes:
        cubin: an ELF file for exactly one SM (and, for 90 and above, that SM's own features).
        symbol: name of the function in the cubin.
        threads: per block, in x. shared_bytes: dynamic shared memory of a block.
        scratch_bytes: global scratch of one block; a launch of G blocks needs G times as much,
            aligned to scratch_alignment. 0: pass a null pointer.
        arguments: types in launch order; the last `num_scratch` are SCRATCH_TYPES.
        overlap: compiled to wait for the launch ahead by itself (see OVERLAP).
        cluster: blocks a program is.
        prefers_l1: see `KernelSpec`.
    """

    cubin: bytes
    symbol: str
    threads: int
    shared_bytes: int
    scratch_bytes: int
    scratch_alignment: int
    resources: KernelResources
    arguments: tuple[str, ...]
    num_scratch: int = len(SCRATCH_TYPES)
    overlap: bool = False
    cluster: int = 1
    prefers_l1: bool = False


def compile_kernel(spec: KernelSpec, sm: int) -> CompiledKernel:
    """Compile one kernel, or read it from the cache.

    Args:
        sm: compute capability times ten, for example 90.

    Raises:
        UnsupportedError: no Triton, an unknown SM, a spec that does not fit the kernel.
        TapeoutError: the compiler refused the kernel; its message is in the error.
    """
    function = kernel_function(spec)
    _check(spec, function.arg_names, sm)
    stem = _cache_dir() / f"{kernel_digest(spec)}-sm{sm}"
    cached = _read(stem)
    if cached is not None:
        return cached
    with _only_one(stem):
        cached = _read(stem)  # by another process meanwhile
        if cached is not None:
            return cached
        compiled = _compile(spec, function, sm)
        _write(stem, compiled)
    return compiled


@contextmanager
def compilers(workers: int = 0) -> Iterator[None]:
    """Keep the processes of `compile_all` for as long as the context lasts: starting them takes seconds.

    They start at once and get ready while the caller goes on. `workers`: 0 for one a core.
    """
    workers = workers or len(os.sched_getaffinity(0))
    with _pool(workers) as pool:
        for _ in range(workers):
            pool.submit(_get_ready)
        token = _kept.set(pool)
        try:
            yield
        finally:
            _kept.reset(token)


def compile_all(specs: Sequence[KernelSpec], sm: int, workers: int = 0) -> list[CompiledKernel]:
    """Compile several kernels in `workers` processes (0: one a core); results in the order of specs.

    Equal specs are compiled once; inside `compilers` its processes do it. Raises what `compile_kernel`
    raises, for the first that fails, and CapacityError when one of the processes is killed.
    """
    unique = {kernel_digest(spec): spec for spec in specs}
    missing = {
        digest: spec for digest, spec in unique.items() if _read(_cache_dir() / f"{digest}-sm{sm}") is None
    }
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    kept = _kept.get()
    if missing and (kept is not None or workers > 1):
        with nullcontext(kept) if kept is not None else _pool(workers) as pool:
            try:
                list(pool.map(compile_kernel, missing.values(), [sm] * len(missing)))
            except BrokenProcessPool as error:
                raise CapacityError(
                    "a process that compiles kernels was killed, most likely for want of memory",
                    hint="close other programs, or allow fewer processors (taskset)",
                ) from error
    done = {digest: compile_kernel(spec, sm) for digest, spec in unique.items()}
    return [done[kernel_digest(spec)] for spec in specs]


def _pool(workers: int) -> ProcessPoolExecutor:
    # Spawned, not forked: the parent may hold torch's thread pool.
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _get_ready() -> None:
    """Import what the first kernel would import."""
    import triton.backends.nvidia.compiler
    import triton.compiler  # noqa: F401


@contextmanager
def _only_one(stem: Path) -> Iterator[None]:
    """Hold back other processes that are about to compile the same kernel, where files can be locked."""
    lock = stem.with_name(f".{stem.name}.lock")
    with ExitStack() as stack:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("w"))
            stack.callback(lock.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check(spec: KernelSpec, names: Sequence[str], sm: int) -> None:
    """Everything that is wrong with a spec, at once."""
    where = f"{spec.module}:{spec.function}"
    problems = []
    if sm not in _SUPPORTED_SMS:
        problems.append(f"SM {sm} is not one of {', '.join(map(str, _SUPPORTED_SMS))}")
    given = [name for name, _ in spec.signature]
    if missing := [n for n in names if n not in given and n not in spec.constants and n != OVERLAP]:
        problems.append(f"arguments {missing} have neither a type nor a constant value")
    if unknown := [n for n in (*given, *spec.constants, *spec.divisible_by_16) if n not in names]:
        problems.append(f"{unknown} are not arguments of the kernel, which takes {list(names)}")
    if given != [n for n in names if n in given]:
        problems.append(f"typed arguments stand in the order {given}, the kernel's is {list(names)}")
    if bad := [f"{n}: {t}" for n, t in spec.signature if t not in _TYPES | _POINTERS]:
        problems.append(f"types {bad} are not among {sorted(_TYPES | _POINTERS)}")
    if problems:
        raise UnsupportedError(f"kernel {where} cannot be compiled: " + "; ".join(problems))


def _compile(spec: KernelSpec, function: Any, sm: int) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import GluonASTSource

    types = dict(spec.signature)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names)
        if name in spec.divisible_by_16
    }
    constants = dict(spec.constants)
    if overlap := OVERLAP in function.arg_names:
        constants[OVERLAP] = overlap = sm >= _OVERLAP_SM
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(function, signature, constants, attrs)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": spec.fp_fusion}
    if spec.cluster > 1:
        options["num_ctas"] = spec.cluster
    try:
        with _private_triton_cache():
            built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
            cubin: bytes = built.asm["cubin"]
            meta = built.metadata
    except Exception as error:
        shown = ", ".join(f"{k}={v}" for k, v in sorted(spec.constants.items()))
        raise TapeoutError(
            f"compiling {spec.module}:{spec.function} for sm_{sm} ({shown}) failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    if meta.profile_scratch_size:
        raise TapeoutError(f"kernel {spec.function} was compiled with profiling on")
    return CompiledKernel(
        cubin,
        meta.name,
        32 * meta.num_warps,
        meta.shared,
        meta.global_scratch_size,
        meta.global_scratch_align,
        _resources(cubin, meta.name),
        (*(kind for _, kind in spec.signature), *SCRATCH_TYPES),
        overlap=overlap,
        cluster=spec.cluster,
        prefers_l1=spec.prefers_l1,
    )


@contextmanager
def _private_triton_cache() -> Iterator[None]:
    """Triton without its own cache, line information or profiling, whatever the environment says."""
    from triton import knobs

    with (
        tempfile.TemporaryDirectory(prefix="tapeout-") as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
    ):
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True
        knobs.compilation.store_binary_only = True
        knobs.compilation.instrumentation_mode = ""
        yield


def _resources(cubin: bytes, symbol: str) -> KernelResources:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    match = re.search(rf"Function {re.escape(symbol)}:\s*REG:(\d+) STACK:(\d+)", done.stdout)
    if match is None:
        raise TapeoutError(f"cuobjdump reported no resources of {symbol}: {done.stdout}{done.stderr}")
    return KernelResources(int(match[1]), int(match[2]))


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tapeout" / "triton"


def _read(stem: Path) -> CompiledKernel | None:
    """The cached kernel; None when there is none or it was only half written."""
    try:
        head, _, cubin = stem.read_bytes().partition(b"\n")
        fields = json.loads(head)
        if fields.pop("cubin_bytes") != len(cubin):
            return None
        fields["resources"] = KernelResources(**fields["resources"])
        fields["arguments"] = tuple(fields["arguments"])
        return CompiledKernel(cubin=cubin, **fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(stem: Path, kernel: CompiledKernel) -> None:
    """One line of JSON, then the cubin; renamed into place, so that readers see all or nothing."""
    fields = asdict(kernel)
    fields["cubin_bytes"] = len(fields.pop("cubin"))
    temporary = stem.with_name(f".{stem.name}.{os.getpid()}.tmp")
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(json.dumps(fields, sort_keys=True).encode() + b"\n" + kernel.cubin)
        temporary.replace(stem)
    except OSError:
        temporary.unlink(missing_ok=True)  # a cache that cannot be written costs time, nothing else
