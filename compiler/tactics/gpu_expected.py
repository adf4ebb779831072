"""What torch says about a few elements of an op's result, from a few elements of its operands.

Operands are hashed (see plugins/tactic_check/hashed.py), so a row of a matrix is known without the
others: nothing of the size of a weight is ever made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tapeout.compiler.tactics.gpu_cases import input_names, weight_names
from tapeout.plugins.case import sampling
from tapeout.plugins.cpu import OpSignature, StepState
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.op import AttrValue
from tapeout.plugins.reference import bind_reference
from tapeout.plugins.tactic_check.hashed import integers, normals, seed_of
from tapeout.runtime.kv_cache import pages_for
from tapeout.runtime.tactic_timer.pack import CHECKED_LAYER, Cache, Entry, Operand
from tapeout.runtime.tactic_timer.steps import ONE_PAGE, step_tensors

_ROWS, _COLUMNS = 4, 64  # sampled of a result
_SEQUENCES, _SEQUENCE_WORK = 4, 160 * 512  # sampled of a step; query rows times keys torch may look at
_MAX_WEIGHT_ELEMENTS = 1 << 26  # of an op that needs all of a weight for any element
_MAX_GATHERED_ELEMENTS = 1 << 28  # of experts, of which a row needs its own alone
_POOL_ROWS = 4
_WHOLE_HINT = "say in the op's cases.py what an element depends on (SAMPLING)"
_GATHERED_HINT = "one row alone takes that many: without --pack the op gets a default tactic"


@dataclass(frozen=True)
class Sampled:
    """Elements of one output (or, output -1, of the KV pool): float32 [rows, columns]; see `Samples`."""

    output: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    values: np.ndarray


def expected(signature: OpSignature, entry: Entry, stored: Mapping[str, np.ndarray]) -> tuple[Sampled, ...]:
    """Samples of the entry's step of checking.

    Args:
        stored: float32 values of operands that are not hashed, by name.

    Raises UnsupportedError for an op of which no element is known without a whole large weight.
    """
    if entry.cache is not None:
        return _of_sequences(signature, entry, entry.cache, stored)
    return _of_rows(signature, entry, stored)


def _of_rows(signature: OpSignature, entry: Entry, stored: Mapping[str, np.ndarray]) -> tuple[Sampled, ...]:
    """Some rows of the result; some columns of those, where columns need no others."""
    rules = sampling(signature.op)
    real = entry.check.rows if entry.symbol == "T" else entry.check.logit_rows
    rows = _spread(f"{signature.key()} {entry.rows} rows", real, _ROWS)
    width = _width(signature.outputs[0].shape)
    columns = _spread(f"{signature.key()} {entry.rows} columns", width, _COLUMNS)
    names = (*input_names(signature), *weight_names(signature))
    values = _Values(entry, stored)
    cut = columns if rules.columns else np.arange(width)
    by_name = dict(zip(names, (*entry.inputs, *entry.weights), strict=True))
    tables = {name: by_name[ids] for name, ids in rules.gathered.items() if name in by_name}
    rows = rows[: _rows_to_gather([(by_name[name], ids) for name, ids in tables.items()])]
    asked = {
        name: np.unique(values.of(name, by_name[name], rows).numpy(), return_inverse=True)
        for name in set(rules.gathered.values())
    }

    def tensor(name: str, operand: Operand, is_weight: bool) -> torch.Tensor:
        shape = operand.shape
        if name in asked:  # places among what is gathered
            places = asked[name][1].reshape(len(rows), *map(int, shape[1:]))
            return torch.from_numpy(places.astype(np.int32))
        if name in rules.gathered:
            found = asked[rules.gathered[name]][0].astype(np.int64)
            part = values.of(name, operand, found, gathered=True)
        elif name in rules.columns and is_weight:
            part = values.of(name, operand, _blocks(cut, int(shape[0]), width))
        elif is_weight:
            part = values.of(name, operand, np.arange(int(shape[0])))
        else:
            part = values.of(name, operand, rows)
            if name in rules.columns:
                part = part[:, torch.from_numpy(_blocks(cut, _width(shape), width))]
        return part

    tensors = [
        tensor(name, operand, index >= len(entry.inputs))
        for index, (name, operand) in enumerate(by_name.items())
    ]
    inputs, weights = tensors[: len(entry.inputs)], tensors[len(entry.inputs) :]
    results = bind_reference(signature.op, inputs, weights, signature.attrs)()
    found = []
    for index, result in enumerate(results):
        flat = result.reshape(len(rows), -1).float().numpy()
        kept = columns if rules.columns else _spread(f"{index} columns", flat.shape[1], _COLUMNS)
        picked = flat if rules.columns else flat[:, kept]
        found.append(Sampled(index, tuple(rows.tolist()), tuple(kept.tolist()), picked))
    return tuple(found)


def _rows_to_gather(pairs: Sequence[tuple[Operand, Operand]]) -> int | None:
    """How many rows' gathered elements are no more than one operand may have; at least one row.

    pairs: operands that are gathered from, with the operands of their ids.
    """
    most = [_MAX_GATHERED_ELEMENTS // (_width(table.shape) * _width(ids.shape)) for table, ids in pairs]
    return max(1, min(most)) if most else None


def _of_sequences(
    signature: OpSignature, entry: Entry, cache: Cache, stored: Mapping[str, np.ndarray]
) -> tuple[Sampled, ...]:
    """Some sequences of the step as a step of their own, over their pages alone."""
    chosen = _affordable(entry)
    spans = [entry.check.sequences[i] for i in chosen]
    steps = step_tensors(entry.check, cache.tokens_per_page, entry.rows)
    rows = np.concatenate([np.arange(*steps["cu_q"][i : i + 2]) for i in chosen])
    pages = [
        steps["page_table"][i, : pages_for(kv, cache.tokens_per_page)]
        for i, (_, kv) in zip(chosen, spans, strict=True)
    ]
    values = _Values(entry, stored)
    state = _mini_step(cache, spans, pages)
    inputs = [
        values.of(name, operand, rows)
        for name, operand in zip(input_names(signature), entry.inputs, strict=True)
    ]
    weights = [
        values.of(name, operand, np.arange(int(operand.shape[0])))
        for name, operand in zip(weight_names(signature), entry.weights, strict=True)
    ]
    attrs: dict[str, AttrValue] = {**signature.attrs, "layer": CHECKED_LAYER}
    (result,) = bind_reference(signature.op, inputs, weights, attrs, state)()
    # Of every sequence the last row, which sees most, and of the longest ones the first.
    ends = np.cumsum([q for q, _ in spans])
    places = np.unique(np.concatenate([ends - 1, ends[:_ROWS] - [q for q, _ in spans[:_ROWS]]]))
    flat = result.reshape(len(rows), -1).float().numpy()
    columns = _spread(f"{signature.key()} {entry.rows} columns", flat.shape[1], _COLUMNS)
    picked = flat[places][:, columns]
    out = Sampled(0, tuple(rows[places].tolist()), tuple(columns.tolist()), picked)
    return out, _of_pool(entry, cache, state, spans, pages)


def _of_pool(
    entry: Entry, cache: Cache, state: StepState, spans: Sequence[Sequence[int]], pages: list[np.ndarray]
) -> Sampled:
    """Keys and values of the last token of some sequences."""
    tokens = cache.tokens_per_page
    rows, values, start = [], [], 0
    columns = _spread(f"{entry.signature} pool columns", 2 * cache.kv_heads * cache.head_dim, _COLUMNS)
    for (_, kv), mine in list(zip(spans, pages, strict=True))[:_POOL_ROWS]:
        index, slot = divmod(kv - 1, tokens)
        rows.append(int(mine[index]) * tokens + slot)
        of_token = state.kv_pool[start + index, CHECKED_LAYER, :, :, slot]
        values.append(of_token.reshape(-1).float().numpy()[columns])
        start += len(mine)
    return Sampled(-1, tuple(rows), tuple(columns.tolist()), np.stack(values))


def _mini_step(cache: Cache, spans: Sequence[Sequence[int]], pages: list[np.ndarray]) -> StepState:
    """The sequences alone, their pages one after the other in a pool of their own."""
    tokens = cache.tokens_per_page
    shape = (sum(map(len, pages)), CHECKED_LAYER + 1, 2, cache.kv_heads, tokens, cache.head_dim)
    dtype: torch.dtype = getattr(torch, cache.dtype)
    pool = torch.full(shape, torch.nan, dtype=dtype)
    table = torch.full((len(spans), max(map(len, pages))), -1, dtype=torch.int32)
    start = 0
    for b, ((q, kv), mine) in enumerate(zip(spans, pages, strict=True)):
        table[b, : len(mine)] = torch.arange(start, start + len(mine))
        for index in range(pages_for(kv - q, tokens)):
            heads = int(mine[index]) * 2 * cache.kv_heads + np.arange(2 * cache.kv_heads)
            page = normals(cache.seed, heads, np.arange(tokens * cache.head_dim), cache.factor)
            page = page.reshape(2, cache.kv_heads, tokens, cache.head_dim)
            used = min(tokens, kv - q - index * tokens)
            filled = torch.from_numpy(page[:, :, :used]).to(dtype)
            pool[start + index, CHECKED_LAYER, :, :, :used] = filled
        start += len(mine)

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    queries, lengths = [q for q, _ in spans], [kv for _, kv in spans]
    cu_q = [0, *np.cumsum(queries).tolist()]
    return StepState(
        counts=ints([cu_q[-1], len(spans), max(queries), max(lengths)]),
        token_ids=torch.zeros(cu_q[-1], dtype=torch.int32),
        positions=ints([p for q, kv in spans for p in range(kv - q, kv)]),
        cu_q=ints(cu_q),
        kv_lens=ints(lengths),
        page_table=table,
        row_ids=ints([end - 1 for end in cu_q[1:]]),
        kv_pool=pool,
        tokens_per_page=tokens,
    )


def _affordable(entry: Entry) -> list[int]:
    """Sequences of several kinds that torch computes in no time; the cheapest if there is no such one."""
    work = [q * kv for q, kv in entry.check.sequences]
    cheap = [i for i, w in enumerate(work) if w <= _SEQUENCE_WORK]
    if not cheap:
        return [min(range(len(work)), key=work.__getitem__)]
    picked = _spread(f"{entry.signature} {entry.rows} sequences", len(cheap), _SEQUENCES)
    longest = max(cheap, key=work.__getitem__)
    return sorted({longest, *(cheap[i] for i in picked)})


class _Values:
    """Elements of operands as torch tensors."""

    def __init__(self, entry: Entry, stored: Mapping[str, np.ndarray]) -> None:
        self._entry, self._stored = entry, stored
        self._page = ONE_PAGE if entry.cache is None else entry.cache.tokens_per_page

    def of(self, name: str, operand: Operand, rows: np.ndarray, *, gathered: bool = False) -> torch.Tensor:
        """Rows (elements of a vector) in the operand's dtype: [rows, ...]."""
        most_elements = _MAX_GATHERED_ELEMENTS if gathered else _MAX_WEIGHT_ELEMENTS
        content, rest = operand.content, tuple(int(d) for d in operand.shape[1:])
        if content.kind == "step":
            tensors = step_tensors(self._entry.check, self._page, self._entry.rows)
            return torch.from_numpy(tensors[content.name][rows])
        if content.kind == "stored":
            return torch.from_numpy(self._stored[name][rows])
        vector = not rest  # one row
        lines, columns = (np.zeros(1, np.uint32), rows) if vector else (rows, np.arange(int(np.prod(rest))))
        if content.kind == "integers":
            made = torch.from_numpy(integers(content.seed, lines, columns, content.high))
        else:
            count = len(lines) * len(columns)
            if count > most_elements:
                raise UnsupportedError(
                    f"{self._entry.title()}: an element of the result takes {count:,} elements of {name}, "
                    f"expected at most {most_elements:,}",
                    hint=_GATHERED_HINT if gathered else _WHOLE_HINT,
                )
            values = normals(content.seed, lines, columns, content.factor)
            made = torch.from_numpy(values).to(getattr(torch, operand.dtype))
        return made[0] if vector else made.reshape(len(rows), *rest)


def _blocks(columns: np.ndarray, have: int, width: int) -> np.ndarray:
    """The same columns of every block of `width` that an operand has."""
    return np.concatenate([columns + block * width for block in range(have // width)])


def _width(shape: tuple[int | str, ...]) -> int:
    return int(np.prod([int(d) for d in shape[1:]]))


def _spread(name: str, count: int, wanted: int) -> np.ndarray:
    """Up to `wanted` of `count` numbers, ascending: first, last, and others that the name decides."""
    if count <= wanted:
        return np.arange(count)
    rest = seed_of(name) + np.arange(wanted - 2) * 2654435761
    return np.unique(np.concatenate([[0, count - 1], rest % count]))
