"""The kernels that fill and compare operands, in Triton's interpreter: `python interpret_tools.py`.

A program of its own, because TRITON_INTERPRET must be set before kernels are imported. Prints one
JSON object for each thing that was looked at: {"what", "problem"}.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from interpret_cuda import patch_once, teach_bfloat16

from tapeout.plugins.tactic_check import triton as kernels
from tapeout.plugins.tactic_check.hashed import factor_of, integers, normals

_BLOCK = 1024
_SEED, _FACTOR = 2_000_000_011, factor_of(0.02)
_INTS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """NaN is NaN, whatever else its bits say."""
    kind = _INTS.get(got.dtype, got.dtype)
    differs = got.contiguous().view(kind) != wanted.contiguous().view(kind)
    bad = int((differs & ~(got.isnan() & wanted.isnan())).sum())
    return f"{bad} of {got.numel()} elements" if bad else None


def fills(dtype: torch.dtype) -> Iterator[tuple[str, str | None]]:
    """Rows that are shorter and longer than a block, with room behind them that stays as it was."""
    rows, columns, stride = 3, _BLOCK + 77, _BLOCK + 96
    for high in (0, 50_257) if dtype == torch.float32 else (0,):
        kind = torch.int32 if high else dtype
        out = torch.full((rows, stride), -7, dtype=kind)
        blocks = -(-columns // _BLOCK)
        grid, place = (rows * blocks,), (np.arange(rows), np.arange(columns))
        if high:
            kernels.fill_integers[grid](out, columns, stride, blocks, _SEED, high, BLOCK=_BLOCK)
            values = integers(_SEED, *place, high)
        else:
            kernels.fill_normal[grid](out, columns, stride, blocks, _SEED, _FACTOR, BLOCK=_BLOCK)
            values = normals(_SEED, *place, _FACTOR)
        wanted = torch.full((rows, stride), -7, dtype=kind)
        wanted[:, :columns] = torch.from_numpy(values).to(kind)
        yield f"{'integers' if high else 'normals'} {kind}", same_bits(out, wanted)


def cache(dtype: torch.dtype) -> Iterator[tuple[str, str | None]]:
    """Layer 1 of 2; pages that are full, begun, and empty."""
    pages, heads2, tokens, dim = 3, 4, 16, 80
    pool = torch.full((pages, 2, heads2, tokens, dim), -7, dtype=dtype)
    used = torch.tensor([tokens, 5, 0], dtype=torch.int32)
    blocks = -(-tokens * dim // _BLOCK)
    kernels.fill_cache[pages * heads2 * blocks,](
        pool, used, heads2, tokens * dim, dim, blocks, 2, 1, _SEED, _FACTOR, BLOCK=_BLOCK
    )
    values = normals(_SEED, np.arange(pages * heads2), np.arange(tokens * dim), _FACTOR)
    wanted = torch.from_numpy(values).reshape(pages, heads2, tokens, dim).to(dtype)
    for page, count in enumerate(used.tolist()):
        wanted[page, :, count:] = torch.nan
    yield f"layer of a cache, {dtype}", same_bits(pool[:, 1], wanted)
    yield f"the other layer, {dtype}", None if bool((pool[:, 0] == -7).all()) else "was written"


def compare_integers() -> Iterator[tuple[str, str | None]]:
    """As comparisons: -1 is what nobody wrote."""
    rows, columns, stride = 2, 5, 16
    equal = torch.full((rows + 2, stride), -1, dtype=torch.int32)
    equal[1 : rows + 1, :columns] = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    for name, place, value, counts in (
        ("equal", (1, 1), 1, [0, 0, 0]),
        ("another id", (2, 3), 70, [1, 0, 0]),
        ("not written", (2, 0), -1, [1, 0, 1]),
        ("a guard", (1, columns), 3, [0, 1, 0]),
    ):
        got, result = equal.clone(), torch.zeros(4, dtype=torch.int32)
        got[place] = value
        kernels.compare[(rows + 2,)](got, equal, result, rows, columns, stride, 1, 0.0, 0.0, BLOCK=_BLOCK)
        found = result[[0, 1, 3]].tolist()
        yield f"compare integers, {name}", None if found == counts else f"{found}, expected {counts}"


def comparisons(dtype: torch.dtype) -> Iterator[tuple[str, str | None]]:
    """Counts of what was done to one of two equal outputs, guards included."""
    rows, columns, stride = 3, _BLOCK + 5, _BLOCK + 32

    def equal() -> torch.Tensor:
        out = torch.full((rows + 4, stride), torch.nan)
        out[1 : rows + 1, :columns] = torch.from_numpy(
            normals(_SEED, np.arange(rows), np.arange(columns), factor_of(1.0))
        )
        return out.to(dtype)

    def counted(got: torch.Tensor) -> list[int]:
        result, blocks = torch.zeros(4, dtype=torch.int32), -(-stride // _BLOCK)
        kernels.compare[(rows + 4) * blocks,](
            got, equal(), result, rows, columns, stride, blocks, 0.125, 0.5, BLOCK=_BLOCK
        )
        largest = float(result[2:3].view(torch.float32))
        return [*result[:2].tolist(), round(min(largest, 1e6) * 1000), int(result[3])]

    def spoiled(*changes: tuple[tuple[int, int], float]) -> torch.Tensor:
        out = equal()
        for place, value in changes:
            out[place] = value
        return out

    zero = equal()
    zero[1, 3] = 0.0
    largest = round(1000 * abs(float(equal()[1, 3])))
    wanted: Sequence[tuple[str, torch.Tensor, list[int]]] = (
        ("equal", equal(), [0, 0, 0, 0]),
        ("within tolerance", equal() * 1.5, [0, 0, -1, 0]),
        ("one element off", spoiled(((2, _BLOCK + 1), 1000.0)), [1, 0, -1, 0]),
        ("one element zero", zero, [int(largest > 250), 0, largest, 0]),
        ("an element not written", spoiled(((1, 0), torch.nan)), [1, 0, 0, 1]),
        ("an infinite element", spoiled(((3, 7), torch.inf)), [1, 0, -1, 0]),
        ("a guard before", spoiled(((0, 5), 0.0)), [0, 1, 0, 0]),
        ("guards behind and beside", spoiled(((rows + 1, 0), 1.0), ((1, columns), 2.0)), [0, 2, 0, 0]),
    )
    for name, got, counts in wanted:
        found = counted(got)
        right = all(c in (-1, f) for f, c in zip(found, counts, strict=True))
        yield f"compare, {name}, {dtype}", None if right else f"{found}, expected {counts}"

    for name, change, count in (("equal", None, 0), ("a value", 3.0, 1), ("NaN", torch.nan, 1)):
        one, two = (torch.full((1500,), torch.nan, dtype=dtype) for _ in range(2))
        one[:1200] = two[:1200] = 1.0
        if change is not None:
            one[1100] = change
        result = torch.zeros(1, dtype=torch.int32)
        kernels.compare_cache[2,](one, two, result, 1500, 0.1, 0.0, BLOCK=_BLOCK)
        problem = None if int(result[0]) == count else f"{int(result[0])}, expected {count}"
        yield f"compare caches, {name}, {dtype}", problem


def main() -> None:
    torch.set_num_threads(1)
    teach_bfloat16()
    patch_once()
    looks = [look(dtype) for dtype in (torch.float32, torch.bfloat16) for look in (fills, cache, comparisons)]
    for what, problem in itertools.chain(*looks, compare_integers()):
        sys.stdout.write(json.dumps({"what": what, "problem": problem}) + "\n")


if __name__ == "__main__":
    main()
