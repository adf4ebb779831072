"""Cases and tolerances of paged_attention."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType

#: The reference sums in float32; bfloat16 tactics may round probabilities too.
TOLERANCE = {"float32": Tolerance(2e-5, 1e-5), "bfloat16": Tolerance(1.5e-2, 1.6e-2)}

_DECODE = ((1, 1), (1, 40), (1, 129), (1, 64))
_PREFILL = ((33, 33), (5, 5), (1, 1))
_MIXED = ((70, 70), (20, 83), (1, 50), (1, 1), (3, 100))  # prefill, continued chunk, decode


def _case(
    label: str,
    dtype: str,
    sequences: tuple[tuple[int, int], ...] = _MIXED,
    heads: int = 9,
    kv_heads: int = 3,
    dim: int = 64,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    tokens_per_page: int = 32,
) -> Case:
    q, kv = TensorType(dtype, ("T", heads, dim)), TensorType(dtype, ("T", kv_heads, dim))
    attrs = {"layer": 1, "scale": dim**-0.5, "window": window, "softcap": softcap, "alibi": alibi}
    weights = [TensorType("float32", (heads,))] if alibi else []
    weights += [TensorType(dtype, (heads,))] if sinks else []
    types = signature("paged_attention", (q, kv, kv), (q,), tuple(weights), attrs)
    rows = (sum(q_len for q_len, _ in sequences),)
    return Case(f"{dtype} {label}", types, rows, sequences, tokens_per_page)


CASES = tuple(
    case
    for dtype in TOLERANCE
    for case in (
        _case("decode", dtype, _DECODE),
        _case("prefill", dtype, _PREFILL),
        _case("mixed", dtype),
        _case("mixed, pages of 16", dtype, tokens_per_page=16),
        _case("mixed, pages of 24", dtype, tokens_per_page=24),
        _case("mixed, pages of 128", dtype, tokens_per_page=128),
        _case("one sequence", dtype, ((1, 300),)),
        _case("window", dtype, window=17),
        _case("window, decode", dtype, _DECODE, window=40),
        _case("window of one", dtype, window=1),
        _case("softcap", dtype, softcap=2.0),
        _case("sinks", dtype, sinks=True),
        _case("sinks, window, softcap", dtype, sinks=True, window=20, softcap=5.0),
        _case("ALiBi", dtype, alibi=True),
        _case("ALiBi, decode, window", dtype, _DECODE, alibi=True, window=40),
        _case("ALiBi, sinks", dtype, alibi=True, sinks=True),
        _case("one kv head", dtype, heads=4, kv_heads=1),
        _case("no grouping", dtype, heads=4, kv_heads=4),
        _case("64 heads a group", dtype, ((2, 5), (1, 40)), heads=64, kv_heads=1, dim=16),
        _case("head_dim 8", dtype, dim=8),
        _case("head_dim 80", dtype, heads=4, kv_heads=2, dim=80),
        _case("head_dim 128", dtype, heads=4, kv_heads=2, dim=128),
        _case("head_dim 256", dtype, heads=2, kv_heads=1, dim=256, window=30),
    )
)
