"""How one id is chosen from one row of logits: the specification every target follows.

Filters and draw work on integer weights, so that no result depends on the order of a sum:

    z = (logit - max) / temperature             float32; -inf where masked
    y = z * log2(e)                             float32
    w = floor(2**30 * 2**floor(y) * P(y - floor(y)))   int64; 0 where y < -30

P is the polynomial below, by Horner's rule in float32 without fused multiply-add: bit-equal
wherever IEEE arithmetic is. Then, with sums of w over the ids that are left:

    top-k   keep z >= the k-th largest z        (ties at the border stay)
    top-p   keep an id when the w of all ids with a larger z sum to less than top_p * total
    min-p   keep w >= min_p * max w
    draw    t = (u64 * total) >> 64; the first id, in ascending order, whose running sum exceeds t
"""

from __future__ import annotations

import numpy as np

_LOG2_E = np.float32(1.4426950408889634)
# Fit of 2**f on [0, 1), relative error 1.7e-7 in float32, highest power first; P(0) is exactly 1.
_EXP2 = tuple(
    np.float32(float.fromhex(c))
    for c in (
        "0x1.e974fcp-10",
        "0x1.277854p-7",
        "0x1.c91ce6p-5",
        "0x1.ebdb56p-3",
        "0x1.62e4bap-1",
        "0x1.0p+0",
    )
)
_WEIGHT_BITS = 30
_FLOAT32_BIAS, _FLOAT32_FRACTION_BITS = 127, 23
_NUM_BINS, _BINS_PER_UNIT = 1024, np.float32(32)  # weights vanish below z = -21


def weights_of(z: np.ndarray) -> np.ndarray:
    """Integer weights [n] int64 of scaled logits z [n] float32 (largest 0, -inf allowed)."""
    with np.errstate(over="ignore"):  # -inf becomes the bound as well
        y = np.maximum(z * _LOG2_E, np.float32(-_WEIGHT_BITS - 1))
    whole = np.floor(y)
    y -= whole
    value = np.full_like(y, _EXP2[0])
    for coefficient in _EXP2[1:]:
        value *= y
        value += coefficient
    exponent = whole.astype(np.int32) + (_WEIGHT_BITS + _FLOAT32_BIAS)
    value *= (exponent << _FLOAT32_FRACTION_BITS).view(np.float32)  # a power of two: exact
    return value.astype(np.int64)


def choose_id(
    logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float, word: int
) -> int:
    """The sampled id of one row.

    Args:
        logits: [V] float32 after penalties and masks; -inf = never; at least one finite.
        temperature: > 0 in float32 too. top_k: 0 = off. top_p, min_p: as in SamplingParams.
        word: uniform 64-bit integer.
    """
    with np.errstate(over="ignore"):  # a tiny temperature may send a loser to -inf
        z = (logits - logits.max()) / np.float32(temperature)
    ids: np.ndarray | None = None  # None = all, else ascending
    if 0 < top_k < len(z):
        ids = np.flatnonzero(z >= np.partition(z, len(z) - top_k)[len(z) - top_k])
        z = z[ids]
    w = weights_of(z)
    if top_p < 1.0:
        kept = np.flatnonzero(z >= _top_p_border(z, w, top_p))
        ids, w = (kept if ids is None else ids[kept]), w[kept]
    if min_p > 0.0:
        w = np.where(w >= min_p * float(w.max()), w, 0)
    sums = np.cumsum(w)
    target = (word * int(sums[-1])) >> 64
    index = int(np.searchsorted(sums, target, side="right"))
    return index if ids is None else int(ids[index])


def _top_p_border(z: np.ndarray, w: np.ndarray, top_p: float) -> np.float32:
    """The smallest z that top-p keeps: sums by bins of z, then sorts the one bin it falls into."""
    limit = top_p * float(w.sum())  # all sums stay below 2**53: one rounding, the product's
    bins = np.minimum(z * -_BINS_PER_UNIT, _NUM_BINS - 1).astype(np.int32)  # ascending bin, falling z
    sums = np.bincount(bins, weights=w, minlength=_NUM_BINS)
    before = np.cumsum(sums) - sums
    border_bin = int(np.flatnonzero((before < limit) & (sums > 0))[-1])
    inside = bins == border_bin
    z, w = z[inside], w[inside]
    order = np.argsort(-z, kind="stable")
    z, w = z[order], w[order]
    above = before[border_bin] + (np.cumsum(w) - w)  # a tie counts its equals too, but follows one it joins
    last = int(np.searchsorted(above, limit, side="left")) - 1
    return np.float32(z[last])
