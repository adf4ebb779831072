"""CUDA tactics of layer_norm."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    TritonTactic,
    count_index,
    groups_and_dim,
    launch,
    pointer,
    power_of_two,
    step,
    strides,
)

_MAX_DIM = 32768  # one block holds a row in registers


class LayerNorm(TritonTactic):
    """One block per row and group."""

    op = "layer_norm"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if int(signature.outputs[0].shape[-1]) > _MAX_DIM:
            return f"rows of {signature.outputs[0].shape[-1]} elements are longer than {_MAX_DIM}"
        return super().unsupported(signature, target)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        x, out = signature.inputs[0], signature.outputs[0]
        groups, dim = groups_and_dim(out)
        has_bias = len(signature.weights) > 1
        weights = (signature.weights[0], signature.weights[-1])  # absent bias: never read
        arguments = [
            pointer("x", x.dtype, Arg("input", 0)),
            pointer("out", out.dtype, Arg("output", 0)),
            pointer("weight", weights[0].dtype, Arg("weight", 0)),
            pointer("bias", weights[1].dtype, Arg("weight", int(has_bias))),
            step("counts"),
            Argument("eps", "fp32", Arg("f32", value=float(signature.attrs["eps"]))),
            *strides("x", x, "input", 0),
            *strides("out", out, "output", 0),
        ]
        block = power_of_two(dim)
        constants = {"COUNT": count_index(signature), "DIM": dim, "BLOCK": block, "HAS_BIAS": has_bias}
        warps = max(1, min(16, block // 256))
        grid = (GridDim(1), GridDim(0, groups))
        return (launch("layer_norm.triton:layer_norm", arguments, constants, grid, warps),)


TACTICS: tuple[CudaTactic, ...] = (LayerNorm(),)
