"""Cases and tolerances of copy."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

TOLERANCE = {"float32": Tolerance(0.0, 0.0), "bfloat16": Tolerance(0.0, 0.0)}
CASES = tuple(
    Case(
        f"{dtype} {list(shape)}",
        signature("copy", (TensorType(dtype, shape),), (TensorType(dtype, shape),)),
        (1, 3, 40),
    )
    for dtype in TOLERANCE
    for shape in (("T", 64), ("T", 77), ("T", 3, 40), ("T", 2, 3, 16))
)
