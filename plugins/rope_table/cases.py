"""Cases and tolerances of rope_table."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

TOLERANCE = {"float32": Tolerance(1e-6, 1e-6), "bfloat16": Tolerance(1e-6, 8e-3)}
CASES = tuple(
    Case(
        f"{dtype} {ids} half {half} scaling {scaling}",
        signature(
            "rope_table",
            (TensorType(ids, ("T",)),),
            (TensorType(dtype, ("T", 2 * half)),),
            (TensorType("float32", (half,)),),
            {"scaling": scaling, "dtype": dtype},
        ),
        (1, 3, 40),
    )
    for dtype in TOLERANCE
    for ids, half, scaling in (("int32", 32, 1.0), ("int64", 5, 1.25))
)
