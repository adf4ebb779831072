"""Cases and tolerances of linear."""

from __future__ import annotations

from tapeout.plugins.case import Case, Sampling, Tolerance, signature
from tapeout.plugins.cpu import TensorType

#: bfloat16: one rounding of the result, and of partial sums in library kernels.
TOLERANCE = {"float32": Tolerance(2e-5, 1e-5), "bfloat16": Tolerance(1e-2, 1e-2)}
SAMPLING = Sampling(columns=("weight", "bias"))

#: (N, K): usual, ragged in both, smaller than a vector, tall, wide.
_SHAPES = ((96, 64), (61, 77), (3, 5), (200, 48), (24, 320))


def _case(dtype: str, n: int, k: int, bias: bool, rows: tuple[int, ...]) -> Case:
    weights = (TensorType(dtype, (n, k)),) + ((TensorType(dtype, (n,)),) if bias else ())
    types = signature("linear", (TensorType(dtype, ("T", k)),), (TensorType(dtype, ("T", n)),), weights)
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
