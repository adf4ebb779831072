"""Kernels that report logprobs of the raw logits: sampler.top_logprobs, except for the last logarithm.

What a row reports is laid out in logprob_words.py. Rows that want none return at once. Ranks, ids and
values are exact; the sum of exponentials is the device's.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.sample.triton import _STATE_WORDS, _TOP_BIT, order, slot_of
from tapeout.plugins.triton_aot.overlap import take_turn

_NO_KEY: tl.constexpr = tl.constexpr(-0x8000000000000000)
_TOP_LOGPROBS: tl.constexpr = tl.constexpr(12)  # word of state.py


@triton.jit
def partial_logprobs(
    logits, highs, totals, ranks, keys, counts, row_ids, row_seqs, seq_slots, sample_state, out_ids,
    logits_row,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, TOP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Of a chunk: its largest logit, the sum of exponentials below it, how many ids rank before the
    sampled one, and the keys of its top ids. Grid (rows, chunks).

    A key is int64, the order of the value above the falling id: the largest key is the next in rank.
    """
    T = take_turn(counts, 4, OVERLAP)
    row, chunk = tl.program_id(0), tl.program_id(1)
    if row >= T:
        return
    slot = slot_of(row, row_ids, row_seqs, seq_slots)
    top = tl.load(sample_state + slot * _STATE_WORDS + _TOP_LOGPROBS)
    if top < 0:
        return
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < VOCAB
    source = logits + row.to(tl.int64) * logits_row
    value = tl.load(source + column, mask=inside, other=float("-inf")).to(tl.float32)
    sampled = tl.load(out_ids + row)
    sampled_value = tl.load(source + sampled).to(tl.float32)
    before = (value > sampled_value) | ((value == sampled_value) & (column < sampled))
    highest = tl.max(value, axis=0)
    at = row * CHUNKS + chunk
    tl.store(highs + at, highest)
    tl.store(totals + at, tl.sum(tl.exp(value - highest).to(tl.float64), axis=0))
    tl.store(ranks + at, tl.sum((inside & before).to(tl.int32), axis=0))
    key = (order(value).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    key = tl.where(inside, key, _NO_KEY)
    for i in range(top):
        best = tl.max(key, axis=0)
        tl.store(keys + at * TOP + i, best)
        key = tl.where(key == best, _NO_KEY, key)


@triton.jit
def merge_logprobs(
    logits, highs, totals, ranks, keys, counts, row_ids, row_seqs, seq_slots, sample_state, out_ids,
    out_logprobs, logits_row,
    CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, KEYS_BLOCK: tl.constexpr, TOP: tl.constexpr,
    WORDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The words of one row from its chunks. Grid (rows,)."""
    T = take_turn(counts, 4, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    slot = slot_of(row, row_ids, row_seqs, seq_slots)
    top = tl.load(sample_state + slot * _STATE_WORDS + _TOP_LOGPROBS)
    if top < 0:
        return
    out = out_logprobs + row * WORDS
    chunk = tl.arange(0, CHUNKS_BLOCK)
    inside = chunk < CHUNKS
    high = tl.load(highs + row * CHUNKS + chunk, mask=inside, other=float("-inf"))
    total = tl.load(totals + row * CHUNKS + chunk, mask=inside, other=0.0)
    rank = tl.load(ranks + row * CHUNKS + chunk, mask=inside, other=0)
    highest = tl.max(high, axis=0)
    total = tl.sum(total * tl.exp(high - highest).to(tl.float64), axis=0).to(tl.int64, bitcast=True)
    sampled = tl.load(out_ids + row)
    value = tl.load(logits + row.to(tl.int64) * logits_row + sampled).to(tl.float32)
    tl.store(out, tl.sum(rank, axis=0) + 1)
    tl.store(out + 1, value.to(tl.int32, bitcast=True))
    tl.store(out + 2, highest.to(tl.int32, bitcast=True))
    tl.store(out + 4, (total & 0xFFFFFFFF).to(tl.int32))
    tl.store(out + 5, (total >> 32).to(tl.int32))
    i = tl.arange(0, KEYS_BLOCK)
    wanted = (i < CHUNKS * TOP) & (i % TOP < top)
    key = tl.load(keys + row * (CHUNKS * TOP) + i, mask=wanted, other=_NO_KEY)
    for n in range(top):
        best = tl.max(key, axis=0)
        ordered = (best >> 32).to(tl.int32)
        tl.store(out + 8 + n, 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32))
        tl.store(out + 8 + TOP + n, tl.where(ordered < 0, _TOP_BIT - ordered, ordered))
        key = tl.where(key == best, _NO_KEY, key)
