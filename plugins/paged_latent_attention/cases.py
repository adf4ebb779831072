"""Cases and tolerances of paged_latent_attention."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

TOLERANCE = {"float32": Tolerance(3e-5, 2e-5), "bfloat16": Tolerance(2e-2, 2e-2)}

_DECODE = ((1, 1), (1, 40), (1, 129), (1, 64))
_SHORT = ((3, 3), (2, 40), (1, 33), (1, 1))
_MIXED = ((70, 70), (20, 83), (1, 50), (1, 1), (3, 100))  # prefill, continued chunk, decode


def _case(
    label: str,
    dtype: str,
    sequences: tuple[tuple[int, int], ...] = _MIXED,
    heads: int = 4,
    nope: int = 16,
    rotary: int = 16,
    rank: int = 32,
    value: int = 16,
    window: int = 0,
    tokens_per_page: int = 32,
) -> Case:
    types = signature(
        "paged_latent_attention",
        (
            TensorType(dtype, ("T", heads, nope)),
            TensorType(dtype, ("T", heads, rotary)),
            TensorType(dtype, ("T", rank)),
            TensorType(dtype, ("T", rotary)),
        ),
        (TensorType(dtype, ("T", heads, value)),),
        (TensorType(dtype, (heads, nope, rank)), TensorType(dtype, (heads, value, rank))),
        {"layer": 1, "scale": (nope + rotary) ** -0.5, "window": window},
    )
    rows = (sum(q_len for q_len, _ in sequences),)
    return Case(f"{dtype} {label}", types, rows, sequences, tokens_per_page)


CASES = tuple(
    case
    for dtype in TOLERANCE
    for case in (
        _case("decode", dtype, _DECODE),
        _case("mixed", dtype),
        _case("short, pages of 16", dtype, _SHORT, tokens_per_page=16),
        _case("short, window, 20 heads", dtype, _SHORT, heads=20, window=17),
        _case("window", dtype, window=17),
        _case("odd sizes", dtype, heads=5, nope=12, rotary=6, rank=30, value=20),
        _case("one head", dtype, _DECODE, heads=1),
    )
)
