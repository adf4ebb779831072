"""Compile Triton kernels to cubins without a GPU.

A cubin's bytes depend on the kernel's sources, its spec, the SM and Triton's version only:
line information, which would hold paths, is off. Compiled kernels are kept in
`$XDG_CACHE_HOME/tapeout/triton`, one file each.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapeout.plugins.cuda import KernelSpec
from tapeout.plugins.errors import TapeoutError, UnsupportedError
from tapeout.plugins.triton_aot.digest import kernel_digest, kernel_function

#: What every Triton kernel takes after its own arguments: global scratch, profiling scratch.
SCRATCH_TYPES = ("*i8", "*i8")

#: A kernel with this constexpr argument calls `overlap.wait_for_earlier` before it touches what other
#: launches write or read; it may then start before they end, on SMs that can. It is filled in here.
OVERLAP = "OVERLAP"
_OVERLAP_SM = 90

_SUPPORTED_SMS = (80, 86, 89, 90, 100, 103, 120, 121)
_TYPES = {"i32", "i64", "u32", "u64", "fp32"}
_POINTERS = {f"*{t}" for t in ("i8", "u8", "i32", "i64", "u32", "u64", "fp16", "bf16", "fp32", "fp64")}


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
    cached = cached_kernel(spec, sm)
    if cached is not None:
        return cached
    stem = _stem(spec, sm)
    with _only_one(stem):
        cached = _read(stem)  # by another process meanwhile
        if cached is not None:
            return cached
        compiled = _compile(spec, function, sm)
        _write(stem, compiled)
    return compiled


def cached_kernel(spec: KernelSpec, sm: int) -> CompiledKernel | None:
    """The kernel from the cache; None when it is not there."""
    return _read(_stem(spec, sm))


def _stem(spec: KernelSpec, sm: int) -> Path:
    return _cache_dir() / f"{kernel_digest(spec)}-sm{sm}"


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
        cubin, meta = _run_stages(source, sm, options)
    except Exception as error:
        shown = ", ".join(f"{k}={v}" for k, v in sorted(spec.constants.items()))
        raise TapeoutError(
            f"compiling {spec.module}:{spec.function} for sm_{sm} ({shown}) failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    if meta["profile_scratch_size"]:
        raise TapeoutError(f"kernel {spec.function} was compiled with profiling on")
    return CompiledKernel(
        cubin,
        meta["name"],
        32 * meta["num_warps"],
        meta["shared"],
        meta["global_scratch_size"],
        meta["global_scratch_align"],
        (*(kind for _, kind in spec.signature), *SCRATCH_TYPES),
        overlap=overlap,
        cluster=spec.cluster,
        prefers_l1=spec.prefers_l1,
    )


def _run_stages(source: Any, sm: int, options: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """The cubin of a kernel, and what Triton's stages tell about it.

    The stages of `triton.compile` without its cache: the key of that is a hash of all of Triton's library,
    half a gigabyte in every process. The environment changes nothing of what is made.
    """
    from triton import knobs
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target = GPUTarget("cuda", sm, 32)
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        knobs.compilation.instrumentation_mode = ""
        backend = make_backend(target)
        parsed = backend.parse_options({**options, **source.parse_options()})
        metadata: dict[str, Any] = dict(vars(parsed))
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed, source.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        codegen, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
        made = source.make_ir(target, parsed, codegen, modules, context)
        for name in list(stages)[list(stages).index(source.ext) :]:
            made = stages[name](made, metadata)
    return made, metadata


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
        fields.pop("resources", None)  # an earlier version kept them
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
