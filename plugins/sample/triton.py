"""Kernels that choose ids, with choose.py's and sampler.py's exact definition.

The constant FULL adds penalties and the min_tokens mask, and the slots' counts of what they sampled;
without it nothing of that is read. Logprobs are triton_logprobs.py's. Compiled without fusing products
and sums: scores and weights must have numpy's bits.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.triton_aot.overlap import take_turn

_NO_INDEX: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_TOP_BIT: tl.constexpr = tl.constexpr(-0x80000000)
_LOWEST_Y: tl.constexpr = tl.constexpr(-31.0)  # -(_WEIGHT_BITS + 1) of choose.py
_STATE_WORDS: tl.constexpr = tl.constexpr(16)  # SAMPLE_STATE_WORDS of state.py, which says what they mean
_NUM_SAMPLED: tl.constexpr = tl.constexpr(14)


@triton.jit
def slot_of(logit_row, row_ids, row_seqs, seq_slots):
    return tl.load(seq_slots + tl.load(row_seqs + tl.load(row_ids + logit_row)))


@triton.jit
def load_float(state):
    return tl.load(state).to(tl.float32, bitcast=True)


@triton.jit
def adjustment(
    slot, sample_state, sample_bits, output_counts, COUNTS_ROW: tl.constexpr, BITS_ROW: tl.constexpr
):
    """What `adjusted` needs to know of a slot."""
    state = sample_state + slot * _STATE_WORDS
    penalties = tl.load(state + 13) != 0
    below_min = tl.load(state + _NUM_SAMPLED) < tl.load(state + 11)
    bits = sample_bits + slot.to(tl.int64) * (2 * BITS_ROW)
    counts = output_counts + slot.to(tl.int64) * COUNTS_ROW
    factors = (load_float(state + 8), load_float(state + 9), load_float(state + 10))
    return penalties, factors, counts, bits, below_min, bits + BITS_ROW


@triton.jit
def has_bit(bits, column, inside):
    return ((tl.load(bits + (column >> 5), mask=inside, other=0) >> (column & 31)) & 1) != 0


@triton.jit
def adjusted(value, column, inside, adjust):
    """Logits after penalties and the min_tokens mask, rounded as in sampler.penalize."""
    penalties, factors, counts, prompt_bits, below_min, ending_bits = adjust
    if penalties:
        repetition, frequency, presence = factors
        count = tl.load(counts + column, mask=inside, other=0)
        seen = has_bit(prompt_bits, column, inside) | (count > 0)
        scaled = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value = tl.where(seen, scaled, value) - frequency * count.to(tl.float32)
        value = tl.where(count > 0, value - presence, value)
    if below_min:
        value = tl.where(has_bit(ending_bits, column, inside), float("-inf"), value)
    return value


@triton.jit
def partial_max(
    logits, values, indices, finites, counts, row_ids, row_seqs, seq_slots, sample_state, sample_bits,
    output_counts, logits_row,
    VOCAB: tl.constexpr, VALID: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    COUNTS_ROW: tl.constexpr, BITS_ROW: tl.constexpr, FULL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Largest valid score of a chunk, its lowest id, and whether all logits are finite.

    Grid (rows, chunks).
    """
    T = take_turn(counts, 4, OVERLAP)
    row, chunk = tl.program_id(0), tl.program_id(1)
    if row >= T:
        return
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * logits_row + column, mask=column < VOCAB, other=0.0)
    value = value.to(tl.float32)
    finite = tl.abs(value) < float("inf")  # false for NaN too
    if FULL:
        slot = slot_of(row, row_ids, row_seqs, seq_slots)
        adjust = adjustment(slot, sample_state, sample_bits, output_counts, COUNTS_ROW, BITS_ROW)
        value = adjusted(value, column, column < VALID, adjust)
    candidate = tl.where((column < VALID) & finite, value, float("-inf"))
    highest = tl.max(candidate, axis=0)
    index = tl.min(tl.where((candidate == highest) & (column < VALID), column, _NO_INDEX), axis=0)
    at = row * CHUNKS + chunk
    tl.store(values + at, highest)
    tl.store(indices + at, index)
    tl.store(finites + at, tl.min(finite.to(tl.int32), axis=0))


@triton.jit
def order(z):
    """int32 that orders as float32 does (z is no NaN; -0 and 0 are one)."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, _TOP_BIT - bits, bits)


@triton.jit
def weight_of(z):
    """The 30-bit integer weight of choose.weights_of, as int64."""
    y = tl.maximum(z * 1.4426950408889634, _LOWEST_Y)
    whole = tl.floor(y)
    y = y - whole
    value = tl.full(y.shape, 0.0018671301659196615, tl.float32)  # 0x1.e974fcp-10
    value = value * y + 0.009017029777169228  # 0x1.277854p-7
    value = value * y + 0.05579991266131401  # 0x1.c91ce6p-5
    value = value * y + 0.24016444385051727  # 0x1.ebdb56p-3
    value = value * y + 0.6931512951850891  # 0x1.62e4bap-1
    value = value * y + 1.0
    exponent = (whole.to(tl.int32) + 157) << 23
    return (value * exponent.to(tl.float32, bitcast=True)).to(tl.int64)


@triton.jit
def load_z(source, start, VALID: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """Scaled scores of a block of ids and which of them exist."""
    logits, highest, temperature, adjust = source
    column = start + tl.arange(0, BLOCK)
    inside = column < VALID
    value = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    if FULL:
        value = adjusted(value, column, inside, adjust)
    return tl.where(inside, tl.div_rn(value - highest, temperature), float("-inf")), inside


@triton.jit
def count_from(source, key, VALID: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """How many z have an order of at least `key`."""
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VALID, BLOCK):
        z, inside = load_z(source, start, VALID, BLOCK, FULL)
        total += (inside & (order(z) >= key)).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def weight_from(source, key, VALID: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """The sum of the weights of all z with an order of at least `key`."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, VALID, BLOCK):
        z, inside = load_z(source, start, VALID, BLOCK, FULL)
        total += tl.where(inside & (order(z) >= key), weight_of(z), 0)
    return tl.sum(total, axis=0)


@triton.jit
def choose(
    logits, values, indices, finites, counts, row_ids, row_seqs, positions, seq_slots, sample_state,
    out_ids, last_ids, sample_bits, output_counts, turns, outbox, outbox_words, logits_row,
    VALID: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    COUNTS_ROW: tl.constexpr, BITS_ROW: tl.constexpr, TURNS: tl.constexpr, FULL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The id of one row, for the next step and for the host; FULL counts it for the slot, which no other row
    of the step has. Grid (rows,).

    Borders of top-k and top-p are found by bisecting the 32-bit order of z: whatever the
    distribution, 32 passes over the row each.
    """
    T = take_turn(counts, 4, OVERLAP)
    r = tl.program_id(0)
    if r >= T:
        return
    chunk = tl.arange(0, CHUNKS_BLOCK)
    inside = chunk < CHUNKS
    value = tl.load(values + r * CHUNKS + chunk, mask=inside, other=float("-inf"))
    index = tl.load(indices + r * CHUNKS + chunk, mask=inside, other=_NO_INDEX)
    finite = tl.min(tl.load(finites + r * CHUNKS + chunk, mask=inside, other=1), axis=0)
    highest = tl.max(value, axis=0)
    best = tl.min(tl.where(value == highest, index, _NO_INDEX), axis=0)
    row = tl.load(row_ids + r)
    slot = tl.load(seq_slots + tl.load(row_seqs + row))
    state = sample_state + slot * _STATE_WORDS
    temperature = load_float(state + 2)
    adjust = ()
    if FULL:
        finite = tl.where(tl.abs(highest) < float("inf"), finite, 0)
        adjust = adjustment(slot, sample_state, sample_bits, output_counts, COUNTS_ROW, BITS_ROW)
    chosen = tl.where(finite == 1, best, 0)
    if (finite == 1) & (temperature > 0):
        source = (logits + r.to(tl.int64) * logits_row, highest, temperature, adjust)
        chosen = draw(source, state, tl.load(positions + row), VALID, BLOCK, FULL)
    tl.store(out_ids + r, chosen)
    mine = outbox + ((tl.load(turns) - 1) & (TURNS - 1)) * outbox_words
    tl.store(mine + r, chosen)
    tl.store(mine + outbox_words // 2 + r, finite)
    tl.store(last_ids + slot, chosen)
    if FULL:
        count_chosen(state, output_counts + slot.to(tl.int64) * COUNTS_ROW, chosen, finite)


@triton.jit
def count_chosen(state, counts, chosen, finite):
    """What `_Slot.record` of sampler.py does. No other block of the launch reads or writes this slot."""
    if finite == 1:
        tl.store(state + _NUM_SAMPLED, tl.load(state + _NUM_SAMPLED) + 1)
        if tl.load(state + 13) != 0:
            tl.store(counts + chosen, tl.load(counts + chosen) + 1)


@triton.jit
def load_double(state):
    """float64 from two words, low first."""
    low = tl.load(state).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(state + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((high << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def draw(source, state, position, VALID: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """choose.choose_id of one row of scores."""
    top_k = tl.load(state + 3)
    top_p, min_p = load_double(state + 4), load_double(state + 6)
    border = tl.full((), -2147483647, tl.int32)  # of the order: everything
    if (top_k > 0) & (top_k < VALID):
        # The largest border that keeps at least top_k ids: their lowest value and its equals.
        low, high = tl.full((), -2147483647, tl.int64), tl.full((), 1, tl.int64)
        while high - low > 1:
            middle = (low + high) >> 1
            enough = count_from(source, middle.to(tl.int32), VALID, BLOCK, FULL) >= top_k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        border = low.to(tl.int32)
    total = weight_from(source, border, VALID, BLOCK, FULL)
    if top_p < 1.0:
        # The smallest order whose larger ones sum to less than the limit; larger ones only: key + 1.
        limit = top_p * total.to(tl.float64)
        low, high = border.to(tl.int64) - 1, tl.full((), 0, tl.int64)
        while high - low > 1:
            middle = (low + high) >> 1
            above = weight_from(source, (middle + 1).to(tl.int32), VALID, BLOCK, FULL)
            keeps = above.to(tl.float64) < limit
            low, high = tl.where(keeps, low, middle), tl.where(keeps, middle, high)
        border = high.to(tl.int32)
    least_exact = min_p * 1073741824.0  # the largest weight is always 2**30
    least = least_exact.to(tl.int64)
    least += (least.to(tl.float64) < least_exact).to(tl.int64)
    seed_low = tl.load(state).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = (tl.load(state + 1).to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low
    zero = tl.zeros((1,), tl.int32)
    first, second, _, _ = tl.philox(seed, zero + position, zero, zero, zero)
    word = (tl.max(first, axis=0).to(tl.uint64) << 32) | tl.max(second, axis=0).to(tl.uint64)
    kept = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, VALID, BLOCK):
        z, inside = load_z(source, start, VALID, BLOCK, FULL)
        w = weight_of(z)
        kept += tl.where(inside & (order(z) >= border) & (w >= least), w, 0)
    target = tl.umulhi(word, tl.sum(kept, axis=0).to(tl.uint64)).to(tl.int64)
    before, chosen = tl.full((), 0, tl.int64), tl.full((), 0x7FFFFFFF, tl.int32)
    for start in range(0, VALID, BLOCK):
        z, inside = load_z(source, start, VALID, BLOCK, FULL)
        w = weight_of(z)
        w = tl.where(inside & (order(z) >= border) & (w >= least), w, 0)
        sums = before + tl.cumsum(w, axis=0)
        column = start + tl.arange(0, BLOCK)
        chosen = tl.minimum(chosen, tl.min(tl.where(sums > target, column, 0x7FFFFFFF), axis=0))
        before += tl.sum(w, axis=0)
    return chosen
