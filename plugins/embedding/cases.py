"""Cases and tolerances of embedding."""

from __future__ import annotations

from tapeout.plugins.case import Case, Sampling, Tolerance, signature
from tapeout.plugins.cpu import TensorType

TOLERANCE = {"float32": Tolerance(0.0, 0.0), "bfloat16": Tolerance(0.0, 0.0)}
SAMPLING = Sampling(gathered={"weight": "token_ids"})
CASES = tuple(
    Case(
        f"{dtype} {ids} width {width}",
        signature(
            "embedding",
            (TensorType(ids, ("T",)),),
            (TensorType(dtype, ("T", width)),),
            (TensorType(dtype, (50, width)),),
        ),
    )
    for dtype in TOLERANCE
    for ids, width in (("int32", 64), ("int64", 33))
)
