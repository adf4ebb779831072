"""Cases and tolerances of gated_activation."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

#: One more rounding than `activation`: a last-bit difference in act(gate) shows in the product.
TOLERANCE = {"float32": Tolerance(2e-6, 4e-6), "bfloat16": Tolerance(1e-4, 1.6e-2)}
CASES = tuple(
    Case(
        f"{dtype} {kind} width {width}",
        signature(
            "gated_activation",
            (TensorType(dtype, ("T", 2 * width)),),
            (TensorType(dtype, ("T", width)),),
            attrs={"activation": kind},
        ),
        (1, 3, 20),
    )
    for dtype in TOLERANCE
    for kind in ("silu", "gelu", "gelu_tanh", "relu")
    for width in (64, 77, 1536)
)
