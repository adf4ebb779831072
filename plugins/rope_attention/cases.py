"""Cases and tolerances of rope_attention."""

from __future__ import annotations

from tapeout.plugins.case import Case, Tolerance, signature
from tapeout.plugins.cpu import TensorType
from tapeout.plugins.op import AttrValue

#: As paged_attention's; with norms in bfloat16 queries and keys may be a rounding apart too.
TOLERANCE = {"float32": Tolerance(3e-5, 2e-5), "bfloat16": Tolerance(3e-2, 2e-2)}
#: Of the keys a call writes: norms sum in another order, and one rounding of an element of up to 8 moves
#: both elements it is turned with.
CACHE_TOLERANCE = {"float32": Tolerance(2e-5, 4e-6), "bfloat16": Tolerance(6e-2, 2.0**-6)}

_DECODE = ((1, 1), (1, 40), (1, 129), (1, 64))
_MIXED = ((70, 70), (20, 83), (1, 50), (1, 1), (3, 100))  # prefill, continued chunk, decode
_NO_NORM: dict[str, AttrValue] = {
    "qk_norm": False, "eps": 0.0, "weight_offset": 0.0, "cast_before_weight": False,
}  # fmt: skip
_QWEN: dict[str, AttrValue] = {
    "qk_norm": True, "eps": 1e-6, "weight_offset": 0.0, "cast_before_weight": True,
}  # fmt: skip
_GEMMA: dict[str, AttrValue] = {
    "qk_norm": True, "eps": 1e-6, "weight_offset": 1.0, "cast_before_weight": False,
}  # fmt: skip


def _case(
    label: str,
    dtype: str,
    sequences: tuple[tuple[int, int], ...] = _MIXED,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    interleaved: bool = False,
    norm: dict[str, AttrValue] = _NO_NORM,
    tokens_per_page: int = 32,
) -> Case:
    q, kv = TensorType(dtype, ("T", heads, dim)), TensorType(dtype, ("T", kv_heads, dim))
    attrs: dict[str, AttrValue] = {
        "layer": 1, "scale": dim**-0.5, "window": window, "softcap": softcap, "interleaved": interleaved,
    }  # fmt: skip
    weights = [TensorType(dtype, (dim,))] * 2 if norm["qk_norm"] else []
    weights += [TensorType(dtype, (heads,))] if sinks else []
    inputs = (q, kv, kv, TensorType(dtype, ("T", dim)))
    types = signature("rope_attention", inputs, (q,), tuple(weights), attrs | norm)
    rows = (sum(q_len for q_len, _ in sequences),)
    return Case(f"{dtype} {label}", types, rows, sequences, tokens_per_page)


CASES = tuple(
    case
    for dtype in TOLERANCE
    for case in (
        _case("decode", dtype, _DECODE),
        _case("mixed", dtype),
        _case("decode, qk norm", dtype, _DECODE, norm=_QWEN),
        _case("mixed, qk norm with offset", dtype, norm=_GEMMA, window=20),
        _case("interleaved, pages of 16", dtype, interleaved=True, tokens_per_page=16),
        _case("sinks, window, softcap", dtype, sinks=True, window=17, softcap=5.0),
        _case("decode, sinks, qk norm", dtype, _DECODE, sinks=True, norm=_QWEN),
        _case("one kv head, head_dim 128", dtype, ((33, 33), (1, 300)), heads=4, kv_heads=1, dim=128),
    )
)
