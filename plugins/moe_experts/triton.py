"""Kernels of moe_experts: assignments sorted by expert, two grouped matrix products, the weighted sum.

An assignment is one row of x with one of its experts; number row * CHOSEN + k. A row's bits depend on that
row alone: products run over K in one order, whatever rows share a tile.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.activation.triton import activate, sigmoid
from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def sort_assignments(
    ids, starts, order, counts, ids_row,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block per expert: where its assignments begin in `order`, and they themselves."""
    total = take_turn(counts, 0, OVERLAP) * CHOSEN
    expert = tl.program_id(0)
    before, own = 0, 0
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        chosen = tl.load(
            ids + (i // CHOSEN).to(tl.int64) * ids_row + i % CHOSEN, mask=i < total, other=EXPERTS
        )
        before += tl.sum((chosen < expert).to(tl.int32), axis=0)
        own += tl.sum((chosen == expert).to(tl.int32), axis=0)
    tl.store(starts + expert, before)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, before + own)
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        chosen = tl.load(
            ids + (i // CHOSEN).to(tl.int64) * ids_row + i % CHOSEN, mask=i < total, other=EXPERTS
        )
        mine = (chosen == expert).to(tl.int32)
        tl.store(order + before + tl.cumsum(mine, 0) - 1, i, mask=mine > 0)
        before += tl.sum(mine, axis=0)


@triton.jit
def gated(gate, up, alpha, limit, kind: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """The activation of float32 values that are `kind`, rounded to it after each operation."""
    if ACTIVATION == "swiglu_clamped":
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
        turned = sigmoid((gate * alpha).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        swish = (gate * turned).to(kind).to(tl.float32)
        value = ((up + 1.0).to(kind).to(tl.float32) * swish).to(kind)
    else:
        value = activate(gate, ACTIVATION).to(kind)
        if GATED:
            value = (value.to(tl.float32) * up).to(kind)
    return value


@triton.jit
def project_up(
    x, up, bias, starts, order, inner, counts, alpha, limit, x_row,
    CHOSEN: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, INNER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """inner[sorted assignment] = activation(up[expert] x + bias); block = expert, its rows, columns."""
    take_turn(counts, 0, OVERLAP)
    expert = tl.program_id(0)
    first = tl.load(starts + expert) + tl.program_id(1) * BLOCK_M
    stop = tl.load(starts + expert + 1)
    if first >= stop:
        return
    kind: tl.constexpr = x.dtype.element_ty
    place = first + tl.arange(0, BLOCK_M)
    rows = tl.load(order + place, mask=place < stop, other=0) // CHOSEN
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    width: tl.constexpr = 2 * INNER if GATED else INNER
    line = (expert * width + columns).to(tl.int64)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    other = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + rows.to(tl.int64)[:, None] * x_row + k[None, :],
            mask=(place < stop)[:, None] & (k < HIDDEN)[None, :], other=0.0,
        )  # fmt: skip
        inside = (columns < INNER)[None, :] & (k < HIDDEN)[:, None]
        b = tl.load(up + line[None, :] * HIDDEN + k[:, None], mask=inside, other=0.0)
        gate = tl.dot(a, b, gate, input_precision="ieee")
        if GATED:
            c = tl.load(up + (line + INNER)[None, :] * HIDDEN + k[:, None], mask=inside, other=0.0)
            other = tl.dot(a, c, other, input_precision="ieee")
    if HAS_BIAS:
        gate += tl.load(bias + line, mask=columns < INNER, other=0.0).to(tl.float32)[None, :]
        if GATED:
            other += tl.load(bias + line + INNER, mask=columns < INNER, other=0.0).to(tl.float32)[None, :]
    value = gated(
        gate.to(kind).to(tl.float32), other.to(kind).to(tl.float32), alpha, limit, kind, ACTIVATION, GATED
    )
    target = inner + place.to(tl.int64)[:, None] * INNER_ROW + columns[None, :]
    tl.store(target, value, mask=(place < stop)[:, None] & (columns < INNER)[None, :])


@triton.jit
def project_down(
    down, bias, starts, order, inner, parts, counts,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, INNER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """parts[assignment] = down[expert] inner + bias; block = expert, its rows, columns."""
    take_turn(counts, 0, OVERLAP)
    expert = tl.program_id(0)
    first = tl.load(starts + expert) + tl.program_id(1) * BLOCK_M
    stop = tl.load(starts + expert + 1)
    if first >= stop:
        return
    place = first + tl.arange(0, BLOCK_M)
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = (expert * HIDDEN + columns).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INNER, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            inner + place.to(tl.int64)[:, None] * INNER_ROW + k[None, :],
            mask=(place < stop)[:, None] & (k < INNER)[None, :], other=0.0,
        )  # fmt: skip
        inside = (columns < HIDDEN)[None, :] & (k < INNER)[:, None]
        b = tl.load(down + line[None, :] * INNER + k[:, None], mask=inside, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + line, mask=columns < HIDDEN, other=0.0).to(tl.float32)[None, :]
    number = tl.load(order + place, mask=place < stop, other=0)
    target = parts + number.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    tl.store(
        target, total.to(parts.dtype.element_ty), mask=(place < stop)[:, None] & (columns < HIDDEN)[None, :]
    )


@triton.jit
def sum_parts(
    parts, weights, out, counts, weights_row, out_row,
    CHOSEN: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[row] = the weighted sum of its CHOSEN parts, in their order."""
    rows = take_turn(counts, 0, OVERLAP)
    row = tl.program_id(0)
    if row >= rows:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(CHOSEN):
        weight = tl.load(weights + row.to(tl.int64) * weights_row + k)
        part = tl.load(parts + (row.to(tl.int64) * CHOSEN + k) * HIDDEN + columns, mask=inside, other=0.0)
        total += part.to(tl.float32) * weight
    tl.store(out + row.to(tl.int64) * out_row + columns, total.to(out.dtype.element_ty), mask=inside)
