"""Cases and tolerances of xielu."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

TOLERANCE = {"float32": Tolerance(4e-6, 4e-6), "bfloat16": Tolerance(1e-3, 2.0**-7)}
CASES = tuple(
    Case(
        f"{dtype} {list(shape)}",
        signature(
            "xielu", (TensorType(dtype, shape),), (TensorType(dtype, shape),), (TensorType(dtype, (1,)),) * 4
        ),
        (1, 3, 20),
    )
    for dtype in TOLERANCE
    for shape in (("T", 77), ("T", 4, 64))
)
