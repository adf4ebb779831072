"""Base of the tactics that call a native kernel, and how views become kernel arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.native.library import NativeLibrary

if TYPE_CHECKING:
    import torch

#: dtype name to its code in common.h.
DTYPE_CODES = {"float32": 0, "bfloat16": 1}


def dtype_code(tensor: torch.Tensor) -> int:
    return DTYPE_CODES[str(tensor.dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class Rows:
    """A view as rows x groups x dim with contiguous dim; strides count elements."""

    rows: int
    groups: int
    dim: int
    row_stride: int
    group_stride: int


def as_rows(tensor: torch.Tensor, what: str) -> Rows:
    """Describe a view of up to three dimensions; raises UnsupportedError when the last is strided."""
    sizes, strides = tuple(tensor.shape), tensor.stride()
    if not 1 <= len(sizes) <= 3 or (sizes[-1] > 1 and strides[-1] != 1):
        raise UnsupportedError(
            f"{what} has shape {list(sizes)} and strides {list(strides)}; native kernels take one to three "
            f"dimensions with a contiguous last one",
            hint="insert a copy op before it",
        )
    rows, row_stride = (sizes[0], strides[0]) if len(sizes) > 1 else (1, 0)
    groups, group_stride = (sizes[1], strides[1]) if len(sizes) > 2 else (1, 0)
    return Rows(rows, groups, sizes[-1], row_stride, group_stride)


class NativeTactic(CpuTactic):
    """A tactic that is one call of a kernel of the engine's library.

    Kernels are written so that a row's bits depend on that row alone.
    """

    name = "native"
    batch_invariant = True
    #: dtypes the activations and float weights may have.
    dtypes: Sequence[str] = tuple(DTYPE_CODES)

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        floats = {t.dtype for t in (*signature.inputs, *signature.outputs) if not t.dtype.startswith("int")}
        if not floats <= set(self.dtypes):
            return f"no native kernel for {', '.join(sorted(floats - set(self.dtypes)))}"
        return None

    def library(self, call: BoundCall) -> NativeLibrary:
        """The loaded kernels; raises UnsupportedError when the call has none."""
        if call.kernels is None:
            raise UnsupportedError(
                f"tactic {self.op}/{self.name} needs the native kernels, and none are loaded",
                hint="pass the library from load_native(...) as BoundCall.kernels",
            )
        library: NativeLibrary = call.kernels
        return library
