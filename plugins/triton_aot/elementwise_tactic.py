"""Tactics of the ops whose output elements depend on one element of each input, and on small weights."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import Arg, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    TritonTactic,
    ceil_div,
    count_index,
    groups_and_dim,
    launch,
    pointer,
    power_of_two,
    step,
    strides,
)

_ELEMENTS_PER_THREAD, _MAX_BLOCK = 8, 1024  # 16 bytes of bfloat16 a thread


def block_of(width: int) -> tuple[int, int]:
    """(elements, warps) of a block that works on a row of `width` elements."""
    block = min(_MAX_BLOCK, max(32, power_of_two(width)))
    return block, max(1, min(4, block // (32 * _ELEMENTS_PER_THREAD)))


class Elementwise(TritonTactic):
    """One block per row and 1,024 elements of it.

    Args:
        op_name: the op. kernel: "module:function"; it takes the operands, `weights`, `counts`, float32
            scalars (`scalars`: attribute to argument name), then the strides of every operand.
        constants: further constants; `attr_constants` maps constant to attribute.
        weights: argument names of the op's weights.
    """

    def __init__(
        self,
        op_name: str,
        kernel: str,
        names: tuple[str, ...] = ("x",),
        scalars: dict[str, str] | None = None,
        constants: dict[str, str] | None = None,
        attr_constants: dict[str, str] | None = None,
        weights: tuple[str, ...] = (),
    ) -> None:
        super().__init__(op_name)
        self._kernel, self._names, self._weights = kernel, names, weights
        self._scalars, self._constants, self._attr_constants = (
            scalars or {},
            constants or {},
            attr_constants or {},
        )

    def _operands(self, signature: OpSignature) -> list[tuple[str, TensorType, str, int]]:
        """Name, type, role and index of every one."""
        inputs = enumerate(zip(self._names, signature.inputs, strict=True))
        return [*((n, t, "input", i) for i, (n, t) in inputs), ("out", signature.outputs[0], "output", 0)]

    def strides(self, signature: OpSignature) -> list[Argument]:
        """Of every operand."""
        return [a for operand in self._operands(signature) for a in strides(*operand)]

    def more_constants(self, signature: OpSignature) -> dict[str, int]:
        """Constants that follow the shapes of weights."""
        return {}

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        out = signature.outputs[0]
        groups, dim = groups_and_dim(out)
        block, warps = block_of(groups * dim)
        operands = self._operands(signature)
        arguments = [pointer(name, kind.dtype, Arg(role, i)) for name, kind, role, i in operands]
        arguments += [
            pointer(name, kind.dtype, Arg("weight", i))
            for i, (name, kind) in enumerate(zip(self._weights, signature.weights, strict=True))
        ]
        arguments.append(step("counts"))
        arguments += [
            Argument(name, "fp32", Arg("f32", value=float(signature.attrs[attr])))
            for attr, name in self._scalars.items()
        ]
        arguments += self.strides(signature)
        constants = {
            "COUNT": count_index(signature), "GROUPS": groups, "DIM": dim, "BLOCK": block, **self._constants,
            **{name: signature.attrs[attr] for name, attr in self._attr_constants.items()},
            **self.more_constants(signature),
        }  # fmt: skip
        grid = (GridDim(1), GridDim(0, ceil_div(groups * dim, block)))
        return (launch(self._kernel, arguments, constants, grid, warps),)
