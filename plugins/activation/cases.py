"""Cases and tolerances of activation."""

from __future__ import annotations

from tapeout.plugins.activation.codes import ACTIVATION_CODES
from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

TOLERANCE = {"float32": Tolerance(1e-6, 4e-6), "bfloat16": Tolerance(1e-4, 1.6e-2)}
CASES = tuple(
    Case(
        f"{dtype} {kind} {list(shape)}",
        signature(
            "activation", (TensorType(dtype, shape),), (TensorType(dtype, shape),), attrs={"kind": kind}
        ),
        (1, 3, 20),
    )
    for dtype in TOLERANCE
    for kind in ACTIVATION_CODES
    for shape in (("T", 77), ("T", 4, 64))
)
