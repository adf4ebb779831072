"""Launches of a CUDA engine: what every record turns into, for every range of rows.

The table is keyed like the tactics: by signature, then by range. Operands are named by
position, so that all layers share their entries; pointers are filled in when a bucket is bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.runtime.engine.codec import decode, encode

#: What kernels and the executor agree on beyond this table's form: what argument kinds and step buffers
#: mean, how sampling parameters lie in memory, what is passed for scratch. Raised when any of it changes.
KERNEL_ABI = 4


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        blob: name of its cubin in the engine's kernels section.
        symbol: name in the cubin.
        threads: per block. shared_bytes: dynamic shared memory per block.
        scratch_bytes: global memory every block wants, aligned to 128; 0 for most.
        scratch_pointers: trailing pointer parameters beyond `args` (the first gets the scratch).
        overlap: its blocks may start before the launch ahead of it has ended (programmatic dependent
            launch): it waits by itself before it touches what other launches write or read.
        cluster: blocks a program of the grid is, which run side by side and reach each other's memory.
        prefers_l1: shared memory and the first level cache share their place; it wants the cache.
    """

    blob: str
    symbol: str
    threads: int
    shared_bytes: int
    scratch_bytes: int
    scratch_pointers: int
    overlap: bool
    cluster: int = 1
    prefers_l1: bool = False

    def blocks(self, programs: int) -> int:
        """Blocks of a grid of so many programs."""
        return programs * self.cluster


@dataclass(frozen=True)
class KernelArg:
    """A parameter: see `tapeout.plugins.cuda.Arg` for kinds."""

    kind: str
    index: int
    name: str
    value: int | float


@dataclass(frozen=True)
class Grid:
    """Programs in one dimension: ceil(rows / per_block) * times; `per_block` 0: `times`."""

    per_block: int
    times: int

    def blocks(self, rows: int) -> int:
        return self.times if self.per_block == 0 else -(-rows // self.per_block) * self.times


@dataclass(frozen=True)
class Launch:
    """One launch of a range. `kernel` indexes `LaunchTable.kernels`."""

    kernel: int
    grid: tuple[Grid, ...]
    args: tuple[KernelArg, ...]


@dataclass(frozen=True)
class Matmul:
    """A product by cuBLASLt among the launches: see `tapeout.plugins.cuda.MatmulSpec`.

    Attributes:
        args: as `tapeout.plugins.cuda.MATMUL_ARGS` names them.
        workspace_bytes: what the algorithm takes; in a pack what it may take.
        algorithm: its 64 bytes in hex; "" in a pack, where it is to be found.
        version: of the library that chose it (131000: 13.10.0); 0 in a pack. Another major version is
            another library.
    """

    dtype: str
    n: int
    k: int
    bias: bool
    addend: bool
    args: tuple[KernelArg, ...]
    workspace_bytes: int
    algorithm: str
    version: int


@dataclass(frozen=True)
class RangeLaunches:
    """What runs for row counts up to `max_rows`; `tactic` names it ("" for sampling)."""

    max_rows: int
    tactic: str
    workspace_bytes: int
    launches: tuple[Launch | Matmul, ...]


@dataclass(frozen=True)
class SegmentTensor:
    """What a segment reads or writes: contiguous, in the arena's own layout.

    `shape` is [rows] or [rows, padded row elements] with a symbol in front, or a weight's.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class RowRange:
    """Row counts that a profile serves, and the one that it is tuned for."""

    least: int
    typical: int
    most: int


@dataclass(frozen=True)
class SegmentProfile:
    """An optimization profile of TensorRT's: rows by symbol."""

    rows: Mapping[str, RowRange]


@dataclass(frozen=True)
class Segment:
    """A serialized TensorRT engine for a run of dense ops, whose weights are among its inputs.

    Attributes:
        blob: its name in the engine's segments section.
        package, version: what wrote it, and alone can read it (`tensorrt_rtx`, `1.7.1.116`).
        inputs, weights, outputs: its tensors, in the order of a region's operands.
        profiles: by ascending rows.
        layers: what the builder made of the ops, "type name", of all profiles.
    """

    blob: str
    package: str
    version: str
    inputs: tuple[SegmentTensor, ...]
    weights: tuple[SegmentTensor, ...]
    outputs: tuple[SegmentTensor, ...]
    profiles: tuple[SegmentProfile, ...]
    layers: tuple[str, ...]

    def profile_at(self, rows: Mapping[str, int]) -> int:
        """The profile that serves so many rows by symbol."""
        fits = (all(rows[s] <= r.most for s, r in p.rows.items()) for p in self.profiles)
        return next(number for number, serves in enumerate(fits) if serves)


@dataclass(frozen=True)
class RegionRange:
    """What runs a region up to `max_rows`: a profile of its segment; -1: launches of its records."""

    max_rows: int
    profile: int


@dataclass(frozen=True)
class Region:
    """Records `[first, last)` that a segment can stand for.

    Attributes:
        segment: indexes `LaunchTable.segments`.
        symbol: whose rows choose the range: T or R.
        inputs, outputs: buffers or step inputs. weights: the engine's.
        ranges: ascending. decode_ranges: the same for steps in which every sequence has one row, where it
            differs; else empty.
    """

    first: int
    last: int
    segment: int
    symbol: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    ranges: tuple[RegionRange, ...]
    decode_ranges: tuple[RegionRange, ...] = ()

    def profile_at(self, rows: int, decode: bool) -> int:
        """The profile that serves so many rows; -1 where the records' own launches do."""
        ranges = (decode and self.decode_ranges) or self.ranges
        return next(r.profile for r in ranges if rows <= r.max_rows)

    @property
    def always(self) -> bool:
        """Does a segment run it in every step?"""
        return all(r.profile >= 0 for r in (*self.ranges, *self.decode_ranges))


@dataclass(frozen=True)
class LaunchTable:
    """All kernels and launches of an engine, and the buckets to capture.

    Attributes:
        sm: compute capability times ten that the cubins are for, for example 90.
        kernels: every distinct kernel.
        ranges: signature key to its ranges, ascending.
        decode_ranges: the same for steps in which every sequence has one row, where it differs.
        row_buckets: padded token row counts, ascending; the last is max_num_tokens.
        logit_buckets: padded logit row counts, ascending; the last is max_batch_size.
        workspace_bytes: memory shared by all tactics, beside the arena.
        scratch_bytes: memory for the kernels' own scratch at their largest grids.
        receive: before the records, over T rows: the step's tensors come from the host's memory.
        sample: after the records, over R rows; input 0 is the logits.
        sample_full: in its place in steps with a row that wants penalties, min_tokens or logprobs.
        segments: TensorRT engines of dense regions, each for all regions of its shape.
        regions: where they stand in the program, ascending, apart from each other. A record that every
            step runs within a segment has no `ranges`.
    """

    sm: int
    kernels: tuple[Kernel, ...]
    ranges: Mapping[str, tuple[RangeLaunches, ...]]
    decode_ranges: Mapping[str, tuple[RangeLaunches, ...]]
    row_buckets: tuple[int, ...]
    logit_buckets: tuple[int, ...]
    workspace_bytes: int
    scratch_bytes: int
    receive: tuple[Launch, ...]
    sample: tuple[RangeLaunches, ...]
    sample_full: tuple[RangeLaunches, ...]
    segments: tuple[Segment, ...] = ()
    regions: tuple[Region, ...] = ()

    def all_ranges(self) -> tuple[RangeLaunches, ...]:
        """Every range: of records, of those in decode-only steps, of sampling."""
        keyed = (*self.ranges.values(), *self.decode_ranges.values())
        return tuple(r for row in (*keyed, self.sample, self.sample_full) for r in row)

    def everything(self) -> tuple[Launch | Matmul, ...]:
        """All launches of all ranges."""
        return (*self.receive, *(item for r in self.all_ranges() for item in r.launches))

    def matmul_versions(self) -> tuple[int, ...]:
        """Versions of cuBLASLt that its products are for, ascending; empty: the library is not needed."""
        return tuple(sorted({item.version for item in self.everything() if isinstance(item, Matmul)}))

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = encode(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LaunchTable:
        """Raises EngineCorruptError on unknown or missing keys."""
        return decode(cls, data, "launches")
