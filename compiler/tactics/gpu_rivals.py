"""Segments that compete with our kernels in a pack, as whoever built them hands them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tapeout.compiler.regions import Body
from tapeout.compiler.tactics.gpu_contests import Contest
from tapeout.compiler.tactics.gpu_regions import RegionContest, region_contests
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.tactic_timer.pack import PackedSegment


@dataclass(frozen=True)
class Rivals:
    """Segments of a model's regions; none where no package of this machine builds them.

    Attributes:
        bodies: distinct regions by digest. segments: theirs, by the same. plans: serialized, by blob.
        absent: why there are none; "" where they were not asked for.
    """

    bodies: Mapping[str, Body] = field(default_factory=dict)
    segments: Mapping[str, PackedSegment] = field(default_factory=dict)
    plans: Mapping[str, bytes] = field(default_factory=dict)
    absent: str = ""

    @property
    def digests(self) -> Mapping[str, str]:
        """SHA-256 of every segment, by its region's digest."""
        return {digest: packed.sha256 for digest, packed in self.segments.items()}

    def contests(self, decisions: Sequence[Contest], limits: Limits) -> tuple[RegionContest, ...]:
        """Every region at every bucket; see `region_contests`."""
        profiles = {digest: packed.segment.profiles for digest, packed in self.segments.items()}
        return region_contests(self.bodies, profiles, decisions, limits)


NO_RIVALS = Rivals()
