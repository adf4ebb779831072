"""Is a program sound? Checked before it is written; replaying trusts it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tapeout.runtime.engine.container import DTYPES
from tapeout.runtime.engine.launches import LaunchTable, Region
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program import STEP_INPUTS, Buffer, Program, Record, View


def row_limits(limits: Limits) -> Mapping[str, int]:
    """The largest value of each symbolic dim: T packed token rows, R logit rows."""
    return {"T": limits.max_num_tokens, "R": limits.max_batch_size}


def resolve_shape(shape: tuple[int | str, ...], rows: Mapping[str, int]) -> tuple[int, ...]:
    """`shape` with its symbols replaced."""
    return tuple(rows[d] if isinstance(d, str) else d for d in shape)


def view_extent(view: View, rows: Mapping[str, int]) -> int:
    """One past the last element the view touches, counted from the start of its buffer; 0 when empty."""
    shape = resolve_shape(view.shape, rows)
    if 0 in shape:
        return 0
    return view.offset + sum((d - 1) * s for d, s in zip(shape, view.strides, strict=True)) + 1


@dataclass(frozen=True)
class ProgramWeight:
    """What a program may assume about a weight."""

    dtype: str
    shape: tuple[int, ...]


def program_problems(program: Program, limits: Limits, weights: Mapping[str, ProgramWeight]) -> list[str]:
    """Everything wrong with a program, one line each; empty when it can be replayed.

    Views stay inside their buffers and buffers inside the arena at the engine's limits, buffers
    alive at the same record share no byte, outputs are no step inputs, weights exist with the
    dtypes and shapes their signatures say, every signature has tactics for every row count.
    """
    buffers = {b.name: b for b in program.buffers}
    rows = row_limits(limits)
    problems = [*_arena_problems(program), *_overlap_problems(program, buffers)]
    for i, record in enumerate(program.records):
        where = f"record {i} ({record.op})"
        problems += [f"{where}: {p}" for p in _record_problems(record, program, buffers, rows, weights)]
    problems += [f"logits: {p}" for p in _view_problems(program.logits, buffers, rows, output=True)]
    for key in program.tactics:
        problems += _tactic_problems(key, program, rows)
    return problems


def _tactic_problems(key: str, program: Program, rows: Mapping[str, int]) -> Iterator[str]:
    ends = [r.max_rows for r in program.tactics[key]]
    signature = program.signatures.get(key)
    dims = [d for t in signature.outputs for d in t.shape] if signature else []
    limit = next((rows.get(d, 0) for d in dims if isinstance(d, str)), 1)
    if not ends or ends != sorted(set(ends)) or ends[-1] < limit:
        yield f"tactics of {key}: ranges end at {ends}, expected ascending up to {limit} rows"


def _arena_problems(program: Program) -> Iterator[str]:
    names = [b.name for b in program.buffers]
    yield from (f"buffer {n} is declared twice" for n in {n for n in names if names.count(n) > 1})
    for b in program.buffers:
        if b.dtype not in DTYPES:
            yield f"buffer {b.name}: unknown dtype {b.dtype}"
        if not 0 <= b.offset_bytes <= b.offset_bytes + b.size_bytes <= program.arena_bytes:
            yield (
                f"buffer {b.name}: bytes [{b.offset_bytes}, {b.offset_bytes + b.size_bytes}) "
                f"lie outside the arena of {program.arena_bytes}"
            )


def lifetimes(program: Program) -> dict[str, tuple[int, int]]:
    """Buffer name to the first and last record that touches it; the logits outlive the last record."""
    found: dict[str, tuple[int, int]] = {}
    for i, record in enumerate(program.records):
        for view in (*record.inputs, *record.outputs):
            found[view.buffer] = (found.get(view.buffer, (i, i))[0], i)
    end = len(program.records)
    found[program.logits.buffer] = (found.get(program.logits.buffer, (end, end))[0], end)
    return found


def _overlap_problems(program: Program, buffers: Mapping[str, Buffer]) -> Iterator[str]:
    alive = [(buffers[n], span) for n, span in lifetimes(program).items() if n in buffers]
    alive.sort(key=lambda a: a[0].offset_bytes)
    for i, (a, span_a) in enumerate(alive):
        for b, span_b in alive[i + 1 :]:
            if b.offset_bytes >= a.offset_bytes + a.size_bytes:
                break
            if b.size_bytes and span_a[0] <= span_b[1] and span_b[0] <= span_a[1]:
                yield f"buffers {a.name} and {b.name} share bytes, alive in records {span_a} and {span_b}"


def _record_problems(
    record: Record,
    program: Program,
    buffers: Mapping[str, Buffer],
    rows: Mapping[str, int],
    weights: Mapping[str, ProgramWeight],
) -> Iterator[str]:
    for view in record.inputs:
        yield from _view_problems(view, buffers, rows, output=False)
    for view in record.outputs:
        yield from _view_problems(view, buffers, rows, output=True)
    yield from (f"weight {w} does not exist" for w in record.weights if w and w not in weights)
    signature = program.signatures.get(record.signature)
    if signature is None or record.signature not in program.tactics:
        yield f"no signature or no tactics for {record.signature}"
        return
    if signature.op != record.op:
        yield f"its signature is of op {signature.op}"
    present = [w for w in record.weights if w in weights]
    for name, type_ in zip(present, signature.weights, strict=False):
        if (weights[name].dtype, weights[name].shape) != (type_.dtype, type_.shape):
            yield f"weight {name} is {weights[name]}, its signature says {type_}"


def _view_problems(
    view: View, buffers: Mapping[str, Buffer], rows: Mapping[str, int], *, output: bool
) -> Iterator[str]:
    if view.dtype not in DTYPES or len(view.shape) != len(view.strides):
        yield f"view of {view.buffer} is malformed: {view}"
        return
    unknown = [d for d in view.shape if isinstance(d, str) and d not in rows]
    if unknown:
        yield f"view of {view.buffer} has unknown symbols {unknown}"
        return
    item = DTYPES[view.dtype][1]
    extent = view_extent(view, rows) * item
    if view.buffer in STEP_INPUTS:
        limit = rows["R" if view.buffer == "row_ids" else "T"] * DTYPES["int32"][1]
        if output:
            yield f"writes step input {view.buffer}"
        if view.dtype != "int32":
            yield f"reads step input {view.buffer} as {view.dtype}, expected int32"
    elif view.buffer in buffers:
        limit = buffers[view.buffer].size_bytes
        if buffers[view.buffer].offset_bytes % item:
            yield f"buffer {view.buffer} is not aligned for {view.dtype}"
    else:
        yield f"buffer {view.buffer} does not exist"
        return
    if view.offset < 0 or min(view.strides, default=0) < 0 or extent > limit:
        yield f"view of {view.buffer} reaches byte {extent} of {limit}"


def region_problems(table: LaunchTable, program: Program) -> list[str]:
    """What is wrong with a table's regions, one line each; empty when every record has something to run it.

    Only what a segment never stood for and no launch covers would be skipped in silence.
    """
    problems, end = [], 0
    covered: set[int] = set()
    for region in table.regions:
        where = f"region {region.first}..{region.last}"
        if not end <= region.first < region.last <= len(program.records):
            problems.append(f"{where} overlaps another or lies outside {len(program.records)} records")
            continue
        end = region.last
        problems += [f"{where}: {p}" for p in _region_problems(region, table, program)]
        if region.always:
            covered |= {*range(region.first, region.last)}
    problems += [
        f"record {i} ({record.op}) has neither launches nor a segment"
        for i, record in enumerate(program.records)
        if i not in covered and record.signature not in table.ranges
    ]
    return problems


def _region_problems(region: Region, table: LaunchTable, program: Program) -> Iterator[str]:
    if not 0 <= region.segment < len(table.segments):
        yield f"segment {region.segment} does not exist"
        return
    segment = table.segments[region.segment]
    for what in ("inputs", "weights", "outputs"):
        if len(getattr(region, what)) != len(getattr(segment, what)):
            yield f"has {len(getattr(region, what))} {what}, its segment {len(getattr(segment, what))}"
    known = {*STEP_INPUTS, *(b.name for b in program.buffers)}
    yield from (f"{name} does not exist" for name in (*region.inputs, *region.outputs) if name not in known)
    ranges = (*region.ranges, *region.decode_ranges)
    if bad := [r.profile for r in ranges if not -1 <= r.profile < len(segment.profiles)]:
        yield f"profiles {bad} do not exist"
    rows, logit_rows = table.row_buckets[-1], table.logit_buckets[-1]
    most = rows if region.symbol == "T" else logit_rows
    for name, row, limit in (("", region.ranges, most), ("decode ", region.decode_ranges, logit_rows)):
        ends = [r.max_rows for r in row]
        if (ends or not name) and (ends != sorted(set(ends)) or not ends or ends[-1] < limit):
            yield f"{name}ranges end at {ends}, expected ascending up to {limit} rows"
