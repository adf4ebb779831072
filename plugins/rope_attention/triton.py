"""Kernel of rope_attention that stands before attention: norms, rotations and the cache write in one."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.rms_norm.triton import weighted
from tapeout.plugins.rope.triton import turn
from tapeout.plugins.triton_aot.overlap import let_next_start, wait_for_earlier


@triton.jit
def turned_heads(
    source, gain, cos, sin, first_at, second_at, inside, pairs_inside, eps, weight_offset,
    DIM: tl.constexpr, QK_NORM: tl.constexpr, CAST_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """First and second elements of every pair of some heads, normed and turned, in the dtype of source."""
    kind: tl.constexpr = source.dtype.element_ty
    first = tl.load(source + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=inside, other=0.0).to(tl.float32)
    if QK_NORM:
        squares = tl.sum(first * first + second * second, axis=1) / DIM
        factor = tl.rsqrt(squares + eps)[:, None]
        first_gain = tl.load(gain + first_at, mask=pairs_inside, other=0.0)
        second_gain = tl.load(gain + second_at, mask=pairs_inside, other=0.0)
        first = weighted(first * factor, first_gain, weight_offset, kind, CAST_FIRST, HAS_OFFSET)
        second = weighted(second * factor, second_gain, weight_offset, kind, CAST_FIRST, HAS_OFFSET)
        first, second = first.to(tl.float32), second.to(tl.float32)
    return turn(first, -second, cos, sin, kind).to(kind), turn(second, first, cos, sin, kind).to(kind)


@triton.jit
def prepare(
    q, k, v, table, q_norm, k_norm, queries, keys, counts, positions, row_seqs, page_table, kv_pool,
    eps, weight_offset, q_row, q_group, k_row, k_group, v_row, v_group, table_row, layers, layer, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, KEEP_KEYS: tl.constexpr,
    INTERLEAVED: tl.constexpr, QK_NORM: tl.constexpr, CAST_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row's queries to `queries` [T, HEADS, DIM], its keys and values to the cache.

    With KEEP_KEYS the keys also go to `keys` [T, KV_HEADS, DIM].

    Grid (rows, blocks of query heads, then blocks of kv heads). Compiled without fusing products and
    sums: see rope.
    """
    let_next_start(OVERLAP)
    row, block = tl.program_id(0), tl.program_id(1)
    real = row < tl.load(counts)
    position = tl.load(positions + row, mask=real, other=0)
    seq = tl.load(row_seqs + row, mask=real, other=0)
    page = tl.load(page_table + seq * max_pages + position // PAGE).to(tl.int64)
    wait_for_earlier(OVERLAP)
    if not real:
        return
    Q_BLOCKS: tl.constexpr = tl.cdiv(HEADS, HEADS_BLOCK)
    HALF: tl.constexpr = DIM // 2
    row64 = row.to(tl.int64)
    pairs = tl.arange(0, HALF_BLOCK)[None, :]
    pairs_inside = pairs < HALF
    first_at = 2 * pairs if INTERLEAVED else pairs
    second_at = 2 * pairs + 1 if INTERLEAVED else pairs + HALF
    kind: tl.constexpr = q.dtype.element_ty
    angles = table + row64 * table_row + pairs
    cos = tl.load(angles, mask=pairs_inside, other=0.0).to(kind).to(tl.float32)
    sin = tl.load(angles + HALF, mask=pairs_inside, other=0.0).to(kind).to(tl.float32)
    local = tl.arange(0, HEADS_BLOCK)[:, None]
    if block < Q_BLOCKS:
        heads = block * HEADS_BLOCK + local
        inside = (heads < HEADS) & pairs_inside
        first, second = turned_heads(
            q + row64 * q_row + heads * q_group, q_norm, cos, sin, first_at, second_at, inside, pairs_inside,
            eps, weight_offset, DIM, QK_NORM, CAST_FIRST, HAS_OFFSET,
        )  # fmt: skip
        target = queries + (row64 * HEADS + heads) * DIM
        tl.store(target + first_at, first, mask=inside)
        tl.store(target + second_at, second, mask=inside)
    else:
        heads = (block - Q_BLOCKS) * HEADS_BLOCK + local
        inside = (heads < KV_HEADS) & pairs_inside
        first, second = turned_heads(
            k + row64 * k_row + heads * k_group, k_norm, cos, sin, first_at, second_at, inside, pairs_inside,
            eps, weight_offset, DIM, QK_NORM, CAST_FIRST, HAS_OFFSET,
        )  # fmt: skip
        PLANE: tl.constexpr = KV_HEADS * PAGE * DIM
        cached: tl.constexpr = kv_pool.dtype.element_ty
        target = kv_pool + (page * layers + layer) * (2 * PLANE) + (heads * PAGE + position % PAGE) * DIM
        tl.store(target + first_at, first.to(cached), mask=inside)
        tl.store(target + second_at, second.to(cached), mask=inside)
        if KEEP_KEYS:
            kept = keys + (row64 * KV_HEADS + heads) * DIM
            tl.store(kept + first_at, first, mask=inside)
            tl.store(kept + second_at, second, mask=inside)
        values = v + row64 * v_row + heads * v_group
        target += PLANE
        tl.store(target + pairs, tl.load(values + pairs, mask=inside).to(cached), mask=inside)
        tl.store(target + HALF + pairs, tl.load(values + HALF + pairs, mask=inside).to(cached), mask=inside)
