"""A tactic's launches over operands on the device: what each argument points to, and queueing them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tapeout.plugins.errors import EngineCorruptError
from tapeout.plugins.op import AttrValue
from tapeout.runtime.engine.container import DTYPES
from tapeout.runtime.engine.launches import KernelArg, Launch, Matmul, RangeLaunches
from tapeout.runtime.executors.cuda.cublaslt import Call
from tapeout.runtime.executors.cuda.driver import Stream
from tapeout.runtime.tactic_timer.device import SCRATCH_ALIGNMENT, Kernels, Memory, Products
from tapeout.runtime.tactic_timer.tool_kernels import ToolKernels

_SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}


@dataclass(frozen=True)
class Matrix:
    """An operand as rows on the device. A vector is one row.

    address: of the first element. real, padded: rows with values, and rows of the bucket.
    shape: behind the leading dimension. row_stride: in elements.
    strides: of a window into wider rows, of all dimensions; () where elements lie side by side.
    """

    address: int
    dtype: str
    real: int
    padded: int
    columns: int
    row_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()

    def stride(self, dimension: int) -> int:
        """Elements between steps of a dimension of the operand."""
        if self.strides:
            return self.strides[dimension]
        if dimension == 0:
            return self.row_stride if self.shape else 1
        return math.prod(self.shape[dimension:])


@dataclass(frozen=True)
class Shared:
    """What a timing process has once: kernels, the library of products, stream, numbers of the pack."""

    kernels: Kernels
    tools: ToolKernels
    stream: Stream
    numbers: np.ndarray
    products: Products


@dataclass(frozen=True)
class Workspace:
    """Memory that launches share: what tactics want, then the scratch of kernels."""

    address: int
    tactics_bytes: int
    scratch_bytes: int

    @classmethod
    def of(
        cls,
        ranges: Sequence[tuple[RangeLaunches, int]],
        memory: Memory,
        kernels: Kernels,
        least_bytes: int = 0,
    ) -> Workspace:
        """Memory for each of some launches at their rows; of `least_bytes` or more."""
        tactics = _aligned(max(r.workspace_bytes for r, _ in ranges))
        scratch = max(_scratch_bytes(r, rows, kernels) for r, rows in ranges)
        scratch = max(scratch, least_bytes - tactics)
        return cls(memory.allocate(tactics + scratch, "the workspace"), tactics, scratch)

    @property
    def size_bytes(self) -> int:
        return self.tactics_bytes + self.scratch_bytes


@dataclass(frozen=True)
class Bindings:
    """What the launches of one op point into.

    Attributes:
        rows: padded, of the bucket. attrs: the op's, with `layer` where it has one.
        step: addresses of the step's tensors by name. pool: of the KV pool. layers: of it.
        max_pages: width of the page table.
    """

    rows: int
    inputs: Sequence[Matrix]
    weights: Sequence[Matrix]
    outputs: Sequence[Matrix]
    step: Mapping[str, int]
    workspace: Workspace
    attrs: Mapping[str, AttrValue]
    pool: int = 0
    layers: int = 1
    max_pages: int = 1

    def argument(self, arg: KernelArg) -> tuple[int | float, type]:
        """Value and type; see `tapeout.plugins.cuda.Arg` for kinds."""
        kind = arg.kind
        if kind in _SCALARS:
            return arg.value, _SCALARS[kind]
        pointers = {"input": self.inputs, "weight": self.weights, "output": self.outputs}
        if kind in pointers:
            operands = pointers[kind]
            # A weight that is absent is never read.
            return (operands[arg.index].address if arg.index < len(operands) else 0), ctypes.c_void_p
        if kind in {"input_stride", "output_stride"}:
            matrix = pointers[kind.removesuffix("_stride")][arg.index]
            return matrix.stride(int(arg.value)), ctypes.c_int32
        if kind == "step":
            return (self.pool if arg.name == "kv_pool" else self.step[arg.name]), ctypes.c_void_p
        if kind == "workspace":
            return self.workspace.address + int(arg.value), ctypes.c_void_p
        numbers = {"layers": self.layers, "max_pages": self.max_pages}
        if kind == "attr":
            return int(self.attrs[arg.name]), ctypes.c_int32
        if kind not in numbers:
            raise EngineCorruptError(
                f"the pack has an argument of kind {kind!r}, which is unknown",
                hint="make the pack again with this version: tapeout build MODEL --pack FILE",
            )
        return numbers[kind], ctypes.c_int32


def queue_launches(launches: RangeLaunches, bound: Bindings, shared: Shared) -> None:
    """Queue a tactic's launches."""
    for item in launches.launches:
        if isinstance(item, Matmul):
            call = product_call(item, bound)
            shared.products.library().matmul(call, item.algorithm, shared.stream)
            continue
        pairs = [bound.argument(a) for a in item.args]
        x, y, z = (dim.blocks(bound.rows) for dim in item.grid)
        shared.kernels.launch(
            item.kernel, (x, y, z), [value for value, _ in pairs], [type_ for _, type_ in pairs],
            bound.workspace.address + bound.workspace.tactics_bytes,
        )  # fmt: skip


def warm_up_products(launches: RangeLaunches, bound: Bindings, shared: Shared) -> None:
    """Run products once, that the library loads its kernels outside a capture; results are garbage."""
    for item in launches.launches:
        if isinstance(item, Matmul):
            call = product_call(item, bound)
            shared.products.library().matmul(call, item.algorithm, shared.stream)


def product_call(item: Matmul, bound: Bindings) -> Call:
    """A product, with its addresses."""
    return Call.of(item, bound.rows, lambda arg: bound.argument(arg)[0])


def item_bytes(dtype: str) -> int:
    """Size of an element."""
    return DTYPES[dtype][1]


def _scratch_bytes(launches: RangeLaunches, rows: int, kernels: Kernels) -> int:
    return max(
        (
            kernels.scratch_bytes(item.kernel, math.prod(dim.blocks(rows) for dim in item.grid))
            for item in launches.launches
            if isinstance(item, Launch)
        ),
        default=0,
    )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
