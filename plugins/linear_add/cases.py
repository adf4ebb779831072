"""Cases and tolerances of linear_add."""

from __future__ import annotations

from tapeout.plugins.case import Case, Sampling, Tolerance, signature
from tapeout.plugins.cpu import TensorType

#: bfloat16: the product may round to the other side (2**-6 below 4, however small the sum), and so may
#: the sum.
TOLERANCE = {"float32": Tolerance(2e-5, 1e-5), "bfloat16": Tolerance(2e-2, 1.6e-2)}
SAMPLING = Sampling(columns=("residual", "weight", "bias"))


def _case(dtype: str, n: int, k: int, bias: bool = False, rows: tuple[int, ...] = (1, 2, 5, 8, 33)) -> Case:
    weights = (TensorType(dtype, (n, k)),) + ((TensorType(dtype, (n,)),) if bias else ())
    out = TensorType(dtype, ("T", n))
    types = signature("linear_add", (TensorType(dtype, ("T", k)), out), (out,), weights)
    return Case(f"{dtype} {n}x{k}{' bias' if bias else ''}", types, rows)


CASES = tuple(
    case
    for dtype in TOLERANCE
    for case in (
        _case(dtype, 96, 64),
        _case(dtype, 96, 64, bias=True),
        _case(dtype, 64, 320),
        _case(dtype, 48, 2048, rows=(3, 130)),
        _case(dtype, 576, 1536, bias=True, rows=(1, 9)),
    )
)
