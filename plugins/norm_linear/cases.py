"""Cases and tolerances of norm_linear."""

from __future__ import annotations

from tapeout.plugins.case import Case, Sampling, Tolerance, signature
from tapeout.plugins.cpu import TensorType
from tapeout.plugins.op import AttrValue

#: bfloat16: a kernel may norm x in float32 without rounding in between, which moves gate and up by a
#: rounding each.
TOLERANCE = {"float32": Tolerance(3e-5, 2e-5), "bfloat16": Tolerance(3e-2, 2e-2)}
SAMPLING = Sampling(columns=("weight", "bias"))

_LLAMA, _GEMMA = (0.0, True), (1.0, False)


def _case(
    dtype: str,
    n: int,
    k: int,
    style: tuple[float, bool] = _LLAMA,
    activation: str = "",
    bias: bool = False,
    rows: tuple[int, ...] = (1, 2, 5, 8, 33),
) -> Case:
    weights = [TensorType(dtype, (k,)), TensorType(dtype, (n, k))] + [TensorType(dtype, (n,))] * bias
    offset, cast = style
    attrs: dict[str, AttrValue] = {
        "eps": 1e-5,
        "weight_offset": offset,
        "cast_before_weight": cast,
        "activation": activation,
    }
    out = TensorType(dtype, ("T", n // 2 if activation else n))
    types = signature("norm_linear", (TensorType(dtype, ("T", k)),), (out,), tuple(weights), attrs)
    label = f"{dtype} {n}x{k}{' bias' if bias else ''} {activation or 'plain'} offset {offset}"
    return Case(label, types, rows)


CASES = tuple(
    case
    for dtype in TOLERANCE
    for case in (
        _case(dtype, 96, 64),
        _case(dtype, 96, 64, _GEMMA, bias=True),
        _case(dtype, 64, 320, activation="silu"),
        _case(dtype, 160, 48, _GEMMA, "gelu_tanh", bias=True),
        _case(dtype, 32, 1040, rows=(3, 70)),
        _case(dtype, 1536, 576, activation="silu", rows=(1, 9)),
    )
)
