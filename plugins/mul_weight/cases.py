"""Cases and tolerances of mul_weight."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

TOLERANCE = {"float32": Tolerance(0.0, 0.0), "bfloat16": Tolerance(0.0, 0.0)}
CASES = tuple(
    Case(
        f"{dtype} {list(shape)} by {width}",
        signature(
            "mul_weight",
            (TensorType(dtype, shape),),
            (TensorType(dtype, shape),),
            (TensorType(dtype, (width,)),),
        ),
        (1, 3, 20),
    )
    for dtype in TOLERANCE
    for shape in (("T", 77), ("T", 4, 64))
    for width in (1, int(shape[-1]))
)
