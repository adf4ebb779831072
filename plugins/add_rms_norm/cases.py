"""Cases and tolerances of add_rms_norm."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

#: As rms_norm's, and for the same reason.
TOLERANCE = {"float32": Tolerance(2e-6, 2e-6), "bfloat16": Tolerance(1e-6, 2.0**-6)}

_SHAPES: tuple[tuple[int | str, ...], ...] = (("T", 64), ("T", 100), ("T", 5, 64), ("T", 576))


def _case(dtype: str, weight_dtype: str, shape: tuple[int | str, ...], offset: float, cast: bool) -> Case:
    attrs = {"eps": 1e-5, "weight_offset": offset, "cast_before_weight": cast}
    types = signature(
        "add_rms_norm",
        (TensorType(dtype, shape),) * 2,
        (TensorType(dtype, shape),) * 2,
        (TensorType(weight_dtype, (shape[-1],)),),
        attrs,
    )
    style = "cast first" if cast else "weight first"
    return Case(f"{dtype} weight {weight_dtype} {list(shape)} offset {offset} {style}", types, (1, 3, 8, 70))


CASES = tuple(
    _case(dtype, weight_dtype, shape, offset, cast)
    for dtype, weight_dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
    for shape in _SHAPES
    for offset, cast in ((0.0, True), (1.0, False))
)
