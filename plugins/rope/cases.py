"""Cases and tolerances of rope."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

#: Roundings are the same as the reference's, so the results are too.
TOLERANCE = {"float32": Tolerance(1e-6, 1e-6), "bfloat16": Tolerance(0.0, 0.0)}
CASES = tuple(
    Case(
        f"{dtype} {heads} heads of {dim}, rotary {rotary}{' interleaved' if interleaved else ''}",
        signature(
            "rope",
            (TensorType(dtype, ("T", heads, dim)), TensorType(dtype, ("T", rotary))),
            (TensorType(dtype, ("T", heads, dim)),),
            attrs={"interleaved": interleaved},
        ),
        (1, 3, 40),
    )
    for dtype in TOLERANCE
    for heads, dim, rotary in ((3, 64, 64), (2, 80, 32), (1, 24, 12))
    for interleaved in (False, True)
)
