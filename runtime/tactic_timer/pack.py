"""What a pack says: ops at row counts, the tactics that compete for them, and how to check each.

Plain data, written where the kernels are compiled and read where the GPU is. Kernels are numbered
across the pack; their cubins stand beside it (see pack_file.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.runtime.engine.codec import decode, encode
from tapeout.runtime.engine.launches import Kernel, RangeLaunches, Segment
from tapeout.runtime.engine.program import Record

#: Raised when the meaning of a pack changes; another version's pack is refused.
PACK_VERSION = 3
#: Of packs that hold segments; others do not speak of them, and readers of version 3 understand them.
SEGMENTS_PACK_VERSION = 4
MIXED, DECODE = "mixed", "decode"
#: The layer of the KV pool that checks run on: not the first, so that ignoring `layer` shows.
CHECKED_LAYER = 1


@dataclass(frozen=True)
class Content:
    """What an operand is filled with.

    kind: `normal` (hashed.normals with `factor`), `integers` (hashed.integers below `high`), `step`
    (the step tensor `name`), `stored` (float32 numbers of the pack from `start`).
    """

    kind: str
    seed: int = 0
    factor: float = 0.0
    high: int = 0
    name: str = ""
    start: int = 0


@dataclass(frozen=True)
class Operand:
    """An input or weight. `shape[0]` of an input is T or R."""

    dtype: str
    shape: tuple[int | str, ...]
    content: Content


@dataclass(frozen=True)
class Output:
    """A result, and how far an element may be from the reference: absolute + relative * |wanted|."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    absolute: float
    relative: float


@dataclass(frozen=True)
class Cache:
    """The KV pool [pages, layers, 2, kv_heads, tokens_per_page, head_dim] of ops that read and write it.

    Cached values are hashed.normals of rows page * 2 * kv_heads + (K|V, head) and columns
    (token, dim). `absolute`, `relative`: how far what a tactic writes may be from the reference's.
    """

    dtype: str
    kv_heads: int
    head_dim: int
    tokens_per_page: int
    seed: int
    factor: float
    absolute: float
    relative: float


@dataclass(frozen=True)
class StepCase:
    """The step an op is run in: real counts, and (query rows, cache length after) of each sequence."""

    rows: int
    logit_rows: int
    max_pages: int
    sequences: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Samples:
    """Elements that torch computed: `rows` x `columns` of an output, in float32 numbers from `start`.

    output: index, or -1 for the KV pool after the op; its rows are page * tokens_per_page + slot, its
    columns (K|V, head, dim) of the layer checked.
    """

    output: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Candidate:
    """A tactic's launches at the entry's bucket, and the digest of all that decides their speed.

    reason: why it cannot run, where that is known already (it does not compile); else "".
    """

    tactic: str
    kernel_hash: str
    reason: str
    launches: RangeLaunches


@dataclass(frozen=True)
class Entry:
    """An op signature at one bucket of rows, in one kind of step.

    Attributes:
        signature: `OpSignature.key()`. op: its op.
        kind: `mixed` or `decode`: in the latter every sequence has one row.
        conditions: limits of the engine that shape the steps; "" where none does.
        rows: padded rows of the bucket. symbol: what they count, T or R.
        attrs: the op's attributes without the layer.
        cache: of ops that read or write the KV pool.
        check, timing: the steps that candidates are checked and timed in.
        samples: of `check`, with torch's values.
        reference: the tactic all others are compared with, not necessarily a candidate.
    """

    signature: str
    op: str
    kind: str
    conditions: str
    rows: int
    symbol: str
    attrs: Mapping[str, int | float | str | bool]
    inputs: tuple[Operand, ...]
    weights: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    cache: Cache | None
    check: StepCase
    timing: StepCase
    samples: tuple[Samples, ...]
    reference: Candidate
    candidates: tuple[Candidate, ...]

    def title(self) -> str:
        """For people: the signature, and where."""
        return f"{self.signature} at {self.symbol} = {self.rows}, {self.kind}"


@dataclass(frozen=True)
class WholeStep:
    """A few layers of the model at one bucket: its ops are timed among each other, too.

    Attributes:
        kind: `mixed` or `decode`. conditions: limits of the engine that shape it.
        rows: padded rows of the bucket, in T.
        ops: the entry of each op, in the order in which a step runs them.
        fixed: entries among them that keep the tactic which is fastest alone: other steps decide them.
    """

    kind: str
    conditions: str
    rows: int
    ops: tuple[int, ...]
    fixed: tuple[int, ...]

    def title(self) -> str:
        """For people."""
        return f"the whole step at T = {self.rows}, {self.kind}"


@dataclass(frozen=True)
class PackedSegment:
    """A TensorRT engine that competes with our kernels; its bytes stand beside the pack.

    Attributes:
        segment: its tensors and profiles; `blob` names its bytes.
        sha256: of its bytes, in hex: what its times belong to.
        key: the name under which it is kept beside a timing cache (compiler/tensorrt/segment_cache.py).
        gpu: on which full TensorRT timed its own tactics; "" for TensorRT-RTX.
        seconds: that its builder took.
    """

    segment: Segment
    sha256: str
    key: str
    gpu: str
    seconds: float


@dataclass(frozen=True)
class RegionValue:
    """An input or intermediate result of a region: rows of `row_elements`, as in an arena."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    row_elements: int


@dataclass(frozen=True)
class RegionBody:
    """A run of ops that a segment can stand for, by itself.

    Attributes:
        digest: of its computation (compiler/regions.py). segment: index in the pack.
        inputs, weights: contents by name. values: of the region, inputs first.
        records: its ops; their views and weights go by these names.
        outputs: what later ops read, `name` a value's, with how far the segment may be from our kernels.
    """

    digest: str
    segment: int
    inputs: Mapping[str, Operand]
    weights: Mapping[str, Operand]
    values: tuple[RegionValue, ...]
    records: tuple[Record, ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class RegionCase:
    """A region at one bucket: the best of our kernels one after the other, against its segment.

    Attributes:
        region: index in the pack. kind: `mixed` or `decode`. conditions: what shapes it beside the bucket.
        rows, logit_rows: padded, of T and R.
        ops: the entry of each record.
        check, timing: the steps that the segment is checked and both are timed in.
    """

    region: int
    kind: str
    conditions: str
    rows: int
    logit_rows: int
    ops: tuple[int, ...]
    check: StepCase
    timing: StepCase


@dataclass(frozen=True)
class Pack:
    """Everything to time for one model and target.

    Attributes:
        target: the build's, for example `cuda:h200`. sm, sm_count: what launches were made for.
        cuda: CUDA version of the assembler that made the cubins, for example "13.4".
        kernels: all kernels; `blob` names the cubin.
        tools: kernels that fill and compare, by name (see plugins/tactic_check/tools.py).
        steps: what is timed as a whole when all entries have been timed by themselves.
        segments, regions, region_cases: what TensorRT competes for, after all of this.
    """

    target: str
    sm: int
    sm_count: int
    cuda: str
    kernels: tuple[Kernel, ...]
    tools: Mapping[str, int]
    entries: tuple[Entry, ...]
    steps: tuple[WholeStep, ...]
    segments: tuple[PackedSegment, ...] = ()
    regions: tuple[RegionBody, ...] = ()
    region_cases: tuple[RegionCase, ...] = ()

    @property
    def version(self) -> int:
        """What a reader must know to understand it."""
        return SEGMENTS_PACK_VERSION if self.segments else PACK_VERSION

    def region_title(self, index: int) -> str:
        """For people: which region's case this is, and where."""
        case = self.region_cases[index]
        ops = ", ".join(record.op for record in self.regions[case.region].records)
        return f"region {case.region} ({ops}) at T = {case.rows}, R = {case.logit_rows}, {case.kind}"

    @property
    def num_candidates(self) -> int:
        return sum(len(entry.candidates) for entry in self.entries)

    def to_json(self) -> dict[str, Any]:
        """Plain data; a pack without segments does not speak of them."""
        data: dict[str, Any] = encode(self)
        return data if self.segments else {k: v for k, v in data.items() if k not in _OF_SEGMENTS}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Pack:
        """Raises EngineCorruptError on unknown or missing keys."""
        if isinstance(data, Mapping) and not data.keys() & _OF_SEGMENTS:
            data = {**data, **{key: [] for key in _OF_SEGMENTS}}
        return decode(cls, data, "pack")


_OF_SEGMENTS = {"segments", "regions", "region_cases"}
