"""Kernels that are not compiled: a name in place of each cubin, and tactics made of a line.

Compiling a few hundred candidates takes minutes and says nothing about who is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, KernelSpec, LaunchSpec
from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.triton_aot import CompiledKernel
from tapeout.plugins.triton_aot.compile import SCRATCH_TYPES

#: Of cubins that `compile_nothing` made: an ELF file for SM 90, as far as anybody looks.
_HEAD = b"\x7fELF".ljust(48, b"\0") + (90 << 8).to_bytes(4, "little")


def compile_nothing(
    specs: Sequence[KernelSpec],
    sm: int,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    shared_bytes: Callable[[KernelSpec], int] = lambda spec: 0,
) -> list[CompiledKernel]:
    """In place of `compile_all`; a kernel with the constant BROKEN does not compile."""
    done = []
    for spec in specs:
        if spec.constants.get("BROKEN"):
            raise TapeoutError(f"compiling {spec.function} failed: no such instruction\nand more")
        arguments = (*(kind for _, kind in spec.signature), *SCRATCH_TYPES)
        cubin = _HEAD + spec.key().encode()
        shared = int(spec.constants.get("SHARED", 0)) or shared_bytes(spec)
        done.append(CompiledKernel(cubin, spec.function, 32 * spec.num_warps, shared, 0, 128, arguments))
        progress(len(done), len(specs))
    return done


class FakeTactic(CudaTactic):
    """A tactic of one launch; `us` is what is expected of it, `constants` tell its kernel from others."""

    op = "add"

    def __init__(self, name: str, us: float = 1.0, refusal: str | None = None, **facts: Any) -> None:
        self.name, self._us, self._refusal = name, us, refusal
        self.batch_invariant = facts.pop("batch_invariant", True)
        self.decode_only = facts.pop("decode_only", False)
        self.max_rows = facts.pop("max_rows", 0)
        self.interpretable = facts.pop("interpretable", True)
        self._source = facts.pop("source", ("tapeout.plugins.tactic_check.triton", "fill_integers"))
        self._constants = facts or {"NAME": name}

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        return self._refusal

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        return self._us

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        spec = KernelSpec(*self._source, (("out", "*i32"),), self._constants)
        return (LaunchSpec(spec, (GridDim(1), GridDim(0), GridDim(0)), (Arg("output"),)),)
