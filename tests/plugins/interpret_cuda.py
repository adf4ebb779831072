"""Run CUDA tactics in Triton's interpreter on the CPU.

    python interpret_cuda.py OP[/TACTIC[@LABEL][:EVERY]]...

TACTIC is a part of its name; of its cases whose labels hold LABEL every EVERY-th runs.

A program of its own, because TRITON_INTERPRET must be set before kernels are imported. Prints
one JSON object a case: {"op", "tactic", "case", "rows", "problem", "error"}.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import sys
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tapeout.plugins.case import Case, cases, signature
from tapeout.plugins.cpu import TensorType
from tapeout.plugins.cuda import CudaTactic, CudaTarget, LaunchSpec
from tapeout.plugins.registry import cuda_tactics
from tapeout.plugins.triton_aot.bound_case import Bound, bind
from tapeout.plugins.triton_aot.operands import Operands, grid_of

TORCH_TYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64,
    "fp64": torch.float64,
}  # fmt: skip
#: Interpreted blocks cost milliseconds: cases with more rows than this are left to the GPU.
_MAX_ROWS = 220
_PADDING = 3


def teach_bfloat16() -> None:
    """The interpreter cuts float32 to bfloat16 without rounding and multiplies bfloat16 as integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    cast, dot = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot

    def rounding_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(bits.reshape(src.data.shape), tl.bfloat16)
        return cast(self, src, dst_type)

    def float_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast(self, x, tl.float32) for x in (a, b))
        return dot(self, a, b, *rest)

    builder: Any = interpreter.InterpreterBuilder
    builder.cast_impl, builder.create_dot = rounding_cast, float_dot
    builder.create_fp_ext = builder.create_fp_trunc = rounding_cast


def patch_once() -> None:
    """The interpreter patches Triton's language at every call of a device function: milliseconds each.

    Here it does so once a launch for each function: what is patched stays so until the launch ends.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    module: Any = interpreter
    patch, scope = module._patch_lang, module._LangPatchScope
    patched: set[object] = set()

    class Launch(scope):
        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_new(function: Any) -> Any:
        if function in patched:
            return None  # called within a kernel, which restores
        patched.add(function)
        return patch(function)

    module._patch_lang, module._LangPatchScope = patch_new, Launch

    of_scalar = functools.cache(module._get_np_dtype)  # it builds a dict of all types at every call

    def numpy_dtype(kind: Any) -> Any:
        is_pointer = isinstance(kind.scalar, tl.pointer_type)  # which have no hash
        return np.dtype(np.uint64) if is_pointer else of_scalar(kind.scalar)

    module._get_np_dtype = numpy_dtype


def launch(spec: LaunchSpec, operands: Operands, bucket: int) -> None:
    """Run every block of a launch, one after the other."""
    kernel = getattr(importlib.import_module(spec.kernel.module), spec.kernel.function)
    values, constants = [], dict(spec.kernel.constants)
    for (_, kind), arg in zip(spec.kernel.signature, spec.args, strict=True):
        value = operands.value(arg)
        if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
            value = value[: value.numel() // 8 * 8].view(TORCH_TYPES[kind.removeprefix("*")])
        values.append(value)
    names = [name for name, _ in spec.kernel.signature]
    if "OVERLAP" in kernel.arg_names:
        constants["OVERLAP"] = False
    kernel[grid_of(spec, bucket)](**dict(zip(names, values, strict=True)), **constants)


def extra_cases(op: str) -> tuple[Case, ...]:
    """Deep products, which alone are split over K; the CPU's cases have none."""
    if op != "linear":
        return ()

    def deep(dtype: str, k: int) -> Case:
        weights = (TensorType(dtype, (48, k)), TensorType(dtype, (48,)))
        types = signature("linear", (TensorType(dtype, ("T", k)),), (TensorType(dtype, ("T", 48)),), weights)
        return Case(f"{dtype} 48x{k} bias", types, (3,))

    return deep("float32", 8192), deep("bfloat16", 8224)


def chosen(op: str, wanted: str, label: str) -> list[tuple[CudaTactic, Case, int]]:
    """Some cases of every tactic; all tactics of a family share kernels, so later ones get fewer."""
    found = []
    for tactic in cuda_tactics(op):
        if wanted not in tactic.name or not tactic.interpretable:
            continue
        for case in (*cases(op), *extra_cases(op)):
            if label not in case.label:
                continue
            target = CudaTarget(90, 4, 232448, case.tokens_per_page)
            decode = all(q == 1 for q, _ in case.sequences)
            if tactic.unsupported(case.signature, target) or (tactic.decode_only and not decode):
                continue
            for rows in dict.fromkeys((case.rows[0], case.rows[-1])):
                if rows <= _MAX_ROWS:
                    found.append((tactic, case, rows))
    return found


def repeat_elements(bound: Bound) -> None:
    """Each row of a copy's input one element, repeated: a view whose innermost stride is 0."""
    (x,) = bound.operands.inputs
    repeated = x[..., :1].expand(x.shape)
    bound.operands = replace(bound.operands, inputs=(repeated,))
    bound.expected = (repeated[: bound.rows].clone(),)


def main() -> None:
    torch.set_num_threads(1)
    teach_bfloat16()
    patch_once()
    for argument in sys.argv[1:]:
        op, _, wanted = argument.partition("/")
        wanted, _, every = wanted.partition(":")
        wanted, _, label = wanted.partition("@")
        for tactic, case, rows in itertools.islice(chosen(op, wanted, label), 0, None, int(every or 1)):
            target = CudaTarget(90, 4, 232448, case.tokens_per_page)
            bucket = rows + _PADDING
            bound = bind(case, rows, tactic.workspace_bytes(case.signature, bucket, target), bucket)
            bound.poison()
            if op == "copy" and rows == case.rows[-1]:
                repeat_elements(bound)
            for spec in tactic.launches(case.signature, bound.bucket, target):
                launch(spec, bound.operands, bucket)
            problem, error = bound.problem()
            line = {"op": op, "tactic": tactic.name, "case": case.label, "rows": rows, "problem": problem}
            sys.stdout.write(json.dumps({**line, "error": error}) + "\n")


if __name__ == "__main__":
    main()
