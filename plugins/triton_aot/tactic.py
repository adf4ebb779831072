"""Base of the tactics that launch Triton kernels, and how their launches are written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, KernelSpec, LaunchSpec

#: dtype name to Triton's.
TYPES = {"float32": "fp32", "bfloat16": "bf16", "int32": "i32"}
#: Index into `counts` of the number of rows behind a leading symbol.
COUNTS = {"T": 0, "R": 4}
ONE = GridDim(0, 1)

_ALIGNED_KINDS = frozenset({"input", "output", "weight", "workspace", "input_stride", "output_stride"})
_ALIGNED_STEPS = frozenset({"kv_pool", "output_counts"})  # allocations of their own, read many at once


@dataclass(frozen=True)
class Argument:
    """A kernel argument by name, with its Triton type and where its value comes from.

    aligned: as pointers and strides are by their source: a multiple of 16.
    """

    name: str
    kind: str
    source: Arg
    aligned: bool = True


def pointer(name: str, dtype: str, source: Arg) -> Argument:
    """A pointer to elements of a dtype name."""
    return Argument(name, f"*{TYPES[dtype]}", source)


def step(name: str) -> Argument:
    """A pointer to an int32 step tensor, under its own name."""
    return Argument(name, "*i32", Arg("step", name=name))


def workspace(name: str, dtype: str = "float32", offset_bytes: int = 0) -> Argument:
    return pointer(name, dtype, Arg("workspace", value=offset_bytes))


def strides(name: str, kind: TensorType, role: str, index: int) -> list[Argument]:
    """`<name>_row` and `<name>_group`: element strides of an operand as rows x groups x dim.

    role: `input` or `output`. An operand of two dimensions has one group.
    """
    group = Arg(f"{role}_stride", index, value=1) if len(kind.shape) == 3 else Arg("i32", value=0)
    return [
        Argument(f"{name}_row", "i32", Arg(f"{role}_stride", index, value=0)),
        Argument(f"{name}_group", "i32", group),
    ]


def launch(
    kernel: str,
    arguments: Sequence[Argument],
    constants: Mapping[str, int | float | bool | str],
    grid: Sequence[GridDim],
    num_warps: int = 4,
    num_stages: int = 3,
    fp_fusion: bool = True,
    *,
    cluster: int = 1,
    prefers_l1: bool = False,
) -> LaunchSpec:
    """A launch of `kernel`, "module:function" below `tapeout.plugins`; the grid counts programs."""
    module, _, function = kernel.partition(":")
    spec = KernelSpec(
        f"tapeout.plugins.{module}",
        function,
        tuple((a.name, a.kind) for a in arguments),
        dict(constants),
        num_warps,
        num_stages,
        tuple(a.name for a in arguments if a.aligned and _is_divisible_by_16(a.source)),
        fp_fusion,
        cluster,
        prefers_l1,
    )
    x, y, z = (*grid, ONE, ONE)[:3]
    return LaunchSpec(spec, (x, y, z), tuple(a.source for a in arguments))


def _is_divisible_by_16(source: Arg) -> bool:
    if source.kind == "i32":
        return source.value % 16 == 0
    return source.kind in _ALIGNED_KINDS or source.name in _ALIGNED_STEPS


def groups_and_dim(kind: TensorType) -> tuple[int, int]:
    """(1, D) of [T, D] and (H, D) of [T, H, D]."""
    sizes = [int(d) for d in kind.shape[1:]]
    return (1, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def count_index(signature: OpSignature) -> int:
    """Where `counts` holds the op's number of rows."""
    return COUNTS[str(signature.outputs[0].shape[0])]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


class TritonTactic(CudaTactic):
    """A tactic whose kernels work on float32 and bfloat16 activations of two or three dimensions.

    Kernels are written so that a row's bits depend on that row alone; a tactic whose
    configuration follows the bucket says `batch_invariant = False`.
    """

    name = "triton"
    batch_invariant = True

    def __init__(self, op_name: str = "") -> None:
        if op_name:
            self.op = op_name

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        activations = (*signature.inputs, *signature.outputs)
        dtypes = {t.dtype for t in (*activations, *signature.weights)}
        if unknown := sorted(dtypes - set(TYPES)):
            return f"no CUDA kernel for {', '.join(unknown)}"
        if any(t.shape[0] not in COUNTS for t in activations):
            return f"leading dimensions {[t.shape[0] for t in activations]} are not T or R"
        if deep := [list(t.shape) for t in activations if len(t.shape) > 3]:
            return f"operands {deep} have more than three dimensions"
        # Strides are multiples of 16 elements, so that kernels may load 16 bytes at once. The planner
        # pads rows; it cannot pad what stands inside a row.
        ragged = [list(t.shape) for t in activations if len(t.shape) > 2 and int(t.shape[-1]) % 16]
        return f"the last dimensions of {ragged} are no multiples of 16" if ragged else None
