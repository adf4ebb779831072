"""Cases and tolerances of layer_norm."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

TOLERANCE = {"float32": Tolerance(4e-6, 4e-6), "bfloat16": Tolerance(1e-4, 2.0**-7)}

_SHAPES: tuple[tuple[int | str, ...], ...] = (("T", 64), ("T", 100), ("T", 5, 64), ("T", 768))


def _case(dtype: str, weight_dtype: str, shape: tuple[int | str, ...], bias: bool) -> Case:
    row = TensorType(weight_dtype, (shape[-1],))
    types = signature(
        "layer_norm",
        (TensorType(dtype, shape),),
        (TensorType(dtype, shape),),
        (row, row) if bias else (row,),
        {"eps": 1e-5},
    )
    return Case(f"{dtype} weight {weight_dtype} {list(shape)}{' bias' if bias else ''}", types, (1, 3, 8, 70))


CASES = tuple(
    _case(dtype, weight_dtype, shape, bias)
    for dtype, weight_dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
    for shape in _SHAPES
    for bias in (False, True)
)
