"""Cases and tolerances of moe_router."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType
from tapeout.plugins.op import AttrValue

#: By the dtype of the result: ids are exact, weights float32 whatever the logits are.
TOLERANCE = {"float32": Tolerance(2e-6, 4e-6), "int32": Tolerance(0.0, 0.0)}

_DTYPES = ("float32", "bfloat16")


def _case(
    label: str,
    dtype: str,
    experts: int = 8,
    chosen: int = 2,
    scoring: str = "softmax",
    groups: tuple[int, int, str] = (1, 1, "best"),
    normalize: bool = False,
    scale: float = 1.0,
    bias: bool = False,
) -> Case:
    attrs: dict[str, AttrValue] = {
        "chosen": chosen, "scoring": scoring, "groups": groups[0], "chosen_groups": groups[1],
        "group_by": groups[2], "normalize": normalize, "scale": scale,
    }  # fmt: skip
    types = signature(
        "moe_router",
        (TensorType(dtype, ("T", experts)),),
        (TensorType("int32", ("T", chosen)), TensorType("float32", ("T", chosen))),
        (TensorType("float32", (experts,)),) if bias else (),
        attrs,
    )
    return Case(f"{dtype} {label}", types, (1, 3, 8, 33))


CASES = tuple(
    case
    for dtype in _DTYPES
    for case in (
        _case("softmax", dtype),
        _case("softmax, normalized", dtype, experts=60, chosen=4, normalize=True),
        _case("softmax of the chosen", dtype, scoring="softmax_of_chosen", chosen=4),
        _case("sigmoid, bias", dtype, scoring="sigmoid", bias=True, normalize=True, scale=2.5),
        _case("groups by best", dtype, experts=16, groups=(4, 2, "best"), chosen=3, scale=16.0),
        _case("groups by two", dtype, experts=16, scoring="sigmoid", groups=(4, 2, "best_two"), bias=True),
        _case("every expert", dtype, experts=3, chosen=3),
    )
)  # fmt: skip
