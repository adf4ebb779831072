"""Kernel of rope."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def turn(a, b, cos, sin, KIND: tl.constexpr):
    """a * cos + b * sin of float32 values that are KIND, rounded to KIND after each operation.

    Exact only in kernels compiled without fp_fusion.
    """
    return (a * cos).to(KIND).to(tl.float32) + (b * sin).to(KIND).to(tl.float32)


@triton.jit
def rope(
    x, table, out, counts, x_row, x_group, table_row, out_row, out_group,
    COUNT: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    row64 = row.to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    pairs = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (heads < HEADS) & (pairs < HALF)
    kind: tl.constexpr = out.dtype.element_ty
    source = x + row64 * x_row + heads * x_group
    target = out + row64 * out_row + heads * out_group
    angles = table + row64 * table_row + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0).to(kind).to(tl.float32)
    sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0).to(kind).to(tl.float32)
    first_at = 2 * pairs if INTERLEAVED else pairs
    second_at = 2 * pairs + 1 if INTERLEAVED else pairs + HALF
    first = tl.load(source + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first_at, turn(first, -second, cos, sin, kind).to(kind), mask=inside)
    tl.store(target + second_at, turn(second, first, cos, sin, kind).to(kind), mask=inside)
    if DIM > 2 * HALF:
        passed = (heads < HEADS) & (pairs < DIM - 2 * HALF)
        tl.store(
            target + 2 * HALF + pairs, tl.load(source + 2 * HALF + pairs, mask=passed, other=0.0), mask=passed
        )
