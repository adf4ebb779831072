"""CUDA tactics of rms_norm, and that of add_rms_norm, which shares the kernel."""

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


class RmsNorm(TritonTactic):
    """One block per row and group."""

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if int(signature.outputs[0].shape[-1]) > _MAX_DIM:
            return f"rows of {signature.outputs[0].shape[-1]} elements are longer than {_MAX_DIM}"
        return super().unsupported(signature, target)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        add = signature.op == "add_rms_norm"
        groups, dim = groups_and_dim(signature.outputs[0])
        block = power_of_two(dim)
        operands = [("x", signature.inputs[0], "input", 0)]
        operands += [("residual", signature.inputs[1], "input", 1)] if add else []
        operands += [("out", signature.outputs[0], "output", 0)]
        operands += [("total", signature.outputs[1], "output", 1)] if add else []
        arguments = [pointer(name, kind.dtype, Arg(role, i)) for name, kind, role, i in operands]
        arguments += [pointer("weight", signature.weights[0].dtype, Arg("weight", 0)), step("counts")]
        arguments += [
            Argument("eps", "fp32", Arg("f32", value=float(signature.attrs["eps"]))),
            Argument("weight_offset", "fp32", Arg("f32", value=float(signature.attrs["weight_offset"]))),
        ]
        for name, kind, role, i in operands:
            arguments += strides(name, kind, role, i)
        constants = {
            "COUNT": count_index(signature), "DIM": dim, "BLOCK": block,
            "CAST_FIRST": bool(signature.attrs["cast_before_weight"]),
            "HAS_OFFSET": float(signature.attrs["weight_offset"]) != 0,
        }  # fmt: skip
        warps = max(1, min(16, block // 256))
        kernel = f"rms_norm.triton:{signature.op}"
        return (launch(kernel, arguments, constants, (GridDim(1), GridDim(0, groups)), warps),)


TACTICS: tuple[CudaTactic, ...] = (RmsNorm("rms_norm"),)
