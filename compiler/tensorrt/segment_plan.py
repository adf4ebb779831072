"""The segments of an engine: where each stands, in which steps, and what is known of it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tapeout.compiler.cuda_plan import ROW_MULTIPLE
from tapeout.compiler.ir import Module, Value
from tapeout.compiler.plan import signature_of
from tapeout.compiler.regions import Body, Region
from tapeout.compiler.report import SegmentReport
from tapeout.compiler.tensorrt.builder import Built
from tapeout.compiler.tensorrt.region_onnx import border_shape
from tapeout.runtime.engine import launches
from tapeout.runtime.engine.launches import (
    LaunchTable,
    RegionRange,
    Segment,
    SegmentProfile,
    SegmentTensor,
)
from tapeout.runtime.engine.manifest import RegionTime
from tapeout.runtime.tensorrt.package import KINDS


@dataclass(frozen=True)
class BuiltBody:
    """A distinct region with its segment.

    Attributes:
        onnx_bytes: size of its ONNX model. key: under which it is kept beside a timing cache.
    """

    body: Body
    built: Built
    profiles: tuple[SegmentProfile, ...]
    onnx_bytes: int
    key: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.built.plan).hexdigest()

    @property
    def blob(self) -> str:
        """Its name in an engine or a pack."""
        return f"{self.sha256[:24]}.plan"

    def segment(self, package: str, version: str) -> Segment:
        """As a launch table or a pack has it."""
        values = self.body.values()

        def tensor(value: Value) -> SegmentTensor:
            return SegmentTensor(value.name, value.dtype, border_shape(value, ROW_MULTIPLE))

        return Segment(
            self.blob,
            package,
            version,
            inputs=tuple(map(tensor, self.body.inputs)),
            weights=tuple(SegmentTensor(n, w.dtype, w.shape) for n, w in self.body.weights.items()),
            outputs=tuple(tensor(values[name]) for name in self.body.outputs),
            profiles=self.profiles,
            layers=self.built.layers,
        )


@dataclass(frozen=True)
class Ranges:
    """What runs a region by rows of its symbol: in any step, and in those that only decode where that is
    something else."""

    mixed: tuple[RegionRange, ...]
    decode: tuple[RegionRange, ...] = ()


@dataclass(frozen=True)
class SegmentPlan:
    """The segments of an engine.

    Attributes:
        segments, regions: for the launch table. blobs: engines by name.
        covered: keys of signatures all of whose ops run within segments, in every step.
        reports: in the order of `segments`.
        times: what was measured of every region at every bucket.
        timed: all of them were.
    """

    segments: tuple[Segment, ...]
    regions: tuple[launches.Region, ...]
    blobs: Mapping[str, bytes]
    covered: frozenset[str]
    reports: tuple[SegmentReport, ...]
    times: tuple[RegionTime, ...] = ()
    timed: bool = False

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know."""
        if self.timed:
            return ()
        packages = sorted({f"{KINDS[s.package].title} {s.version}" for s in self.segments})
        fate = "not all were timed" if self.times else "none was timed or compared"
        return tuple(f"segments by {package} were built and not executed: {fate}" for package in packages)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Runs of records that run as one."""
        return tuple((region.first, region.last) for region in self.regions)

    def added_to(self, table: LaunchTable) -> LaunchTable:
        """A table of the other ops' launches, completed."""
        return replace(table, segments=self.segments, regions=self.regions)


def segment_plan(
    module: Module,
    regions: Sequence[Region],
    built: Mapping[str, BuiltBody],
    package: str,
    version: str,
    ranges: Mapping[str, Ranges] | None = None,
) -> SegmentPlan:
    """A plan of these segments.

    Args:
        built: by digest. Regions without one are run by their records.
        ranges: by digest; None for the segment in every step.
    """
    ranges = ranges or {digest: _always(its) for digest, its in built.items()}
    placed = [region for region in regions if region.body.digest in built]
    numbers = {digest: number for number, digest in enumerate(built)}
    uses, reports = uses_of(placed), []
    for digest, its in built.items():
        ops = tuple(node.op for node in its.body.nodes)
        plan, seconds = its.built.plan, round(its.built.seconds, 3)
        reports.append(SegmentReport(its.blob, uses[digest], ops, its.onnx_bytes, len(plan), seconds))
    table = tuple(_placed(region, numbers, ranges[region.body.digest]) for region in placed)
    always = [region for region, its in zip(placed, table, strict=True) if its.always]
    return SegmentPlan(
        tuple(its.segment(package, version) for its in built.values()),
        table,
        {its.blob: its.built.plan for its in built.values()},
        covered_signatures(module, always),
        tuple(reports),
    )


def uses_of(regions: Sequence[Region]) -> Counter[str]:
    """How many of the regions have each body, by its digest."""
    return Counter(region.body.digest for region in regions)


def covered_signatures(module: Module, regions: Sequence[Region]) -> frozenset[str]:
    """Keys of the signatures that occur in regions and nowhere else."""
    inside = {index for region in regions for index in range(region.first, region.last)}
    keys = [signature_of(node, module).key() for node in module.nodes]
    outside = {key for index, key in enumerate(keys) if index not in inside}
    return frozenset(keys) - outside


def _always(its: BuiltBody) -> Ranges:
    symbol = its.body.symbol
    return Ranges(
        tuple(RegionRange(profile.rows[symbol].most, place) for place, profile in enumerate(its.profiles))
    )


def _placed(region: Region, numbers: Mapping[str, int], ranges: Ranges) -> launches.Region:
    return launches.Region(
        region.first,
        region.last,
        numbers[region.body.digest],
        region.body.symbol,
        region.inputs,
        region.weights,
        region.outputs,
        ranges.mixed,
        ranges.decode,
    )
