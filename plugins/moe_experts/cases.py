"""Cases and tolerances of moe_experts."""

from __future__ import annotations

from tapeout.plugins.case import Case, Sampling, Tolerance, signature
from tapeout.plugins.cpu import TensorType

#: Two products of random weights and an activation between: sums in another order, one more rounding each.
TOLERANCE = {"float32": Tolerance(3e-5, 2e-5), "bfloat16": Tolerance(6e-2, 3e-2)}
#: A row needs its own experts alone.
SAMPLING = Sampling(gathered=dict.fromkeys(("up", "down", "up_bias", "down_bias"), "expert_ids"))


def _case(
    label: str,
    dtype: str,
    experts: int = 8,
    chosen: int = 2,
    hidden: int = 64,
    inner: int = 40,
    activation: str = "silu",
    gated: bool = True,
    has_bias: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> Case:
    row, width = TensorType(dtype, ("T", hidden)), 2 * inner if gated else inner
    weights = [TensorType(dtype, (experts, width, hidden)), TensorType(dtype, (experts, hidden, inner))]
    if has_bias:
        weights += [TensorType(dtype, (experts, width)), TensorType(dtype, (experts, hidden))]
    types = signature(
        "moe_experts",
        (row, TensorType("int32", ("T", chosen)), TensorType("float32", ("T", chosen))),
        (row,),
        tuple(weights),
        {"activation": activation, "gated": gated, "has_bias": has_bias, "alpha": alpha, "limit": limit},
    )
    return Case(f"{dtype} {label}", types, (1, 3, 8, 33))


CASES = tuple(
    case
    for dtype in TOLERANCE
    for case in (
        _case("gated silu", dtype),
        _case("one expert a row", dtype, chosen=1),
        _case("every expert", dtype, experts=4, chosen=4),
        _case("wide, odd sizes", dtype, experts=3, hidden=100, inner=77, activation="gelu_tanh"),
        _case("not gated", dtype, activation="relu2", gated=False),
        _case(
            "clamped, biases", dtype, chosen=3, activation="swiglu_clamped", has_bias=True, alpha=1.702,
            limit=0.5,
        ),
        _case("not gated, biases", dtype, activation="gelu", gated=False, has_bias=True),
    )
)  # fmt: skip
