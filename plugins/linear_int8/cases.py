"""Cases and tolerances of linear_int8."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

#: Sums are exact, so only the float32 epilogue and the final rounding may differ.
TOLERANCE = {"float32": Tolerance(1e-6, 1e-6), "bfloat16": Tolerance(1e-6, 8e-3)}

_SHAPES = ((96, 64), (61, 77), (3, 5), (24, 320))


def _case(dtype: str, n: int, k: int, bias: bool, rows: tuple[int, ...]) -> Case:
    weights: tuple[TensorType, ...] = (TensorType("int8", (n, k)), TensorType("float32", (n,)))
    weights += (TensorType(dtype, (n,)),) if bias else ()
    types = signature("linear_int8", (TensorType(dtype, ("T", k)),), (TensorType(dtype, ("T", n)),), weights)
    return Case(f"{dtype} {n}x{k}{' bias' if bias else ''}", types, rows)


CASES = (
    *(
        _case(d, n, k, bias, (1, 2, 3, 4, 5, 6, 7, 8, 33))
        for d in TOLERANCE
        for n, k in _SHAPES
        for bias in (False, True)
    ),
    *(_case(d, 50, 2048, False, (130,)) for d in TOLERANCE),  # more rows than one chunk of x
    *(_case(d, 1536, 576, True, (1, 9)) for d in TOLERANCE),  # enough work for several threads
)
