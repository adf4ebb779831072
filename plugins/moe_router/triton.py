"""Kernel of moe_router: one block per row."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.activation.triton import sigmoid
from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def route(
    logits, bias, ids, weights, counts, scale, logits_row, ids_row, weights_row,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_BLOCK: tl.constexpr,
    SCORING: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr, NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The largest choices one after the other, of equals the lowest id."""
    rows = take_turn(counts, 0, OVERLAP)
    row = tl.program_id(0)
    if row >= rows:
        return
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    low = float("-inf")
    x = tl.load(logits + row.to(tl.int64) * logits_row + expert, mask=inside, other=low).to(tl.float32)
    scores = x
    if SCORING == "softmax":
        scores = tl.exp(x - tl.max(x, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    elif SCORING == "sigmoid":
        scores = sigmoid(x)
    choice = scores
    if HAS_BIAS:
        choice = scores + tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, low)
    if GROUPS > 1:
        size: tl.constexpr = EXPERTS // GROUPS
        group = tl.arange(0, GROUPS_BLOCK)
        best = tl.full((GROUPS_BLOCK,), low, tl.float32)
        for g in range(GROUPS):
            own = tl.where((expert // size == g) & inside, choice, low)
            score = tl.max(own, axis=0)
            if BEST_TWO:
                first = tl.argmax(own, axis=0, tie_break_left=True)
                score += tl.max(tl.where(expert == first, low, own), axis=0)
            best = tl.where(group == g, score, best)
        kept = tl.zeros((BLOCK,), tl.int32)
        for _ in range(CHOSEN_GROUPS):
            g = tl.argmax(best, axis=0, tie_break_left=True)
            kept = tl.where(expert // size == g, 1, kept)
            best = tl.where(group == g, low, best)
        choice = tl.where(inside, tl.where(kept > 0, choice, 0.0), low)
    slot = tl.arange(0, CHOSEN_BLOCK)
    picked = tl.full((CHOSEN_BLOCK,), low if SCORING == "softmax_of_chosen" else 0.0, tl.float32)
    for k in range(CHOSEN):
        best_id = tl.argmax(choice, axis=0, tie_break_left=True)
        tl.store(ids + row.to(tl.int64) * ids_row + k, best_id)
        picked = tl.where(slot == k, tl.sum(tl.where(expert == best_id, scores, 0.0), axis=0), picked)
        choice = tl.where(expert == best_id, low, choice)
    if SCORING == "softmax_of_chosen":
        picked = tl.exp(picked - tl.max(picked, axis=0))
        picked = picked / tl.sum(picked, axis=0)
    if NORMALIZE:
        picked = picked / tl.sum(picked, axis=0)
    tl.store(weights + row.to(tl.int64) * weights_row + slot, picked * scale, mask=slot < CHOSEN)
