"""Random but sensible arguments for an op: what checks and timings run it with. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tapeout.plugins.cpu import OpSignature, StepState, TensorType
from tapeout.plugins.registry import op


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def concrete(kind: TensorType, rows: int, logit_rows: int) -> tuple[int, ...]:
    """The shape with T and R filled in."""
    symbols = {"T": rows, "R": logit_rows}
    return tuple(symbols[d] if isinstance(d, str) else d for d in kind.shape)


@dataclass(frozen=True)
class Example:
    """Arguments of one call; `outputs` are types with concrete shapes."""

    inputs: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    outputs: tuple[TensorType, ...]


def example(signature: OpSignature, rows: int, *, seed: int = 0, logit_rows: int | None = None) -> Example:
    """Arguments for `signature` at T = rows (R = logit_rows, default min(rows, 4))."""
    generator = torch.Generator().manual_seed(seed)
    chosen = min(rows, 4) if logit_rows is None else logit_rows
    schema = op(signature.op)
    first = signature.weights[0].shape[0] if signature.weights else 1
    limit = {"token_ids": first, "expert_ids": first, "row_ids": rows}
    inputs = tuple(
        _tensor(name, kind, concrete(kind, rows, chosen), int(limit.get(name, 0)), generator)
        for name, kind in zip((n.rstrip("?") for n in schema.inputs), signature.inputs, strict=False)
    )
    weights = tuple(
        _tensor(name, kind, concrete(kind, rows, chosen), 0, generator, matrix=name in schema.matrices)
        for name, kind in zip((n.rstrip("?") for n in schema.weights), signature.weights, strict=False)
    )
    outputs = tuple(TensorType(t.dtype, concrete(t, rows, chosen)) for t in signature.outputs)
    return Example(inputs, weights, outputs)


def _tensor(
    name: str,
    kind: TensorType,
    shape: tuple[int, ...],
    limit: int,
    generator: torch.Generator,
    *,
    matrix: bool = False,
) -> torch.Tensor:
    dtype = torch_dtype(kind.dtype)
    if name == "positions":
        start = int(torch.randint(0, 3000, (), generator=generator))
        return torch.arange(start, start + shape[0], dtype=dtype)
    if name == "expert_ids":  # distinct ones in every row
        return torch.rand((shape[0], limit), generator=generator).argsort(1)[:, : shape[1]].to(dtype)
    if limit:
        return torch.randint(0, limit, shape, generator=generator, dtype=dtype)
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=generator, dtype=dtype)
    if name == "inv_freq":
        return (10000.0 ** (-torch.arange(shape[0]) / shape[0])).to(dtype)
    if name == "scale":
        return (torch.rand(shape, generator=generator) * 0.01 + 0.001).to(dtype)
    values = torch.randn(shape, generator=generator)
    if matrix:
        values /= shape[-1] ** 0.5
    return values.to(dtype)


def example_step(
    sequences: Sequence[tuple[int, int]],
    *,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    layers: int = 1,
    tokens_per_page: int = 32,
    seed: int = 0,
) -> StepState:
    """A step of (query rows, cache length after the step) sequences over a shuffled cache.

    Cached tokens are random; every other cache element is NaN, as stale memory may be. The
    step arrays are longer than the step needs and filled with values that must not be read.
    """
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-kv_len // tokens_per_page) for _, kv_len in sequences]
    order = torch.randperm(sum(pages_of) + 3, generator=generator).to(torch.int32)
    shape = (len(order), layers, 2, kv_heads, tokens_per_page, head_dim)
    pool = torch.full(shape, torch.nan, dtype=torch_dtype(dtype))
    page_table = torch.full((len(sequences) + 2, max(pages_of) + 2), -1, dtype=torch.int32)
    cu_q, used = [0], 0
    positions: list[int] = []
    for b, (q_len, kv_len) in enumerate(sequences):
        page_table[b, : pages_of[b]] = order[used : used + pages_of[b]]
        used += pages_of[b]
        for start in range(0, kv_len - q_len, tokens_per_page):
            count = min(tokens_per_page, kv_len - q_len - start)
            page = int(page_table[b, start // tokens_per_page])
            values = torch.randn((layers, 2, kv_heads, count, head_dim), generator=generator)
            pool[page, :, :, :, :count] = values.to(pool.dtype)
        cu_q.append(cu_q[-1] + q_len)
        positions += range(kv_len - q_len, kv_len)
    rows, stale = cu_q[-1], [1 << 30, 1 << 30]
    counts = [rows, len(sequences), max(q for q, _ in sequences), max(kv for _, kv in sequences)]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return StepState(
        counts=ints(counts),
        token_ids=torch.zeros(rows + 2, dtype=torch.int32),
        positions=ints(positions + stale),
        cu_q=ints(cu_q + stale),
        kv_lens=ints([kv for _, kv in sequences] + stale),
        page_table=page_table,
        row_ids=ints([end - 1 for end in cu_q[1:]] + stale),
        kv_pool=pool,
        tokens_per_page=tokens_per_page,
    )
