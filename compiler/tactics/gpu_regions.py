"""Regions: a TensorRT segment against the sum of our own kernels over the same ops, bucket by bucket.

A region is timed with the fastest alone of each of its ops, so an answer stands for those and for the bytes
of the segment: where another has become fastest, or the segment is another one, it is silent and our kernels
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapeout.compiler.cuda_plan import decode_buckets
from tapeout.compiler.plan import buckets, signature_of
from tapeout.compiler.regions import Body
from tapeout.compiler.tactics.gpu_cache import GpuTimings, RegionOutcome, plan_digest
from tapeout.compiler.tactics.gpu_contests import Contest
from tapeout.compiler.tactics.gpu_steps import LOGIT_ROWS, Place, contest_at, place_of
from tapeout.runtime.engine.launches import SegmentProfile
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program_check import row_limits
from tapeout.runtime.tactic_timer.pack import DECODE, MIXED

#: Times alone of a contest by what they belong to (`plan_search.timed_key`).
Times = Mapping[Place, Mapping[str, float]]


@dataclass(frozen=True)
class RegionContest:
    """One decision: what runs a region at one bucket in one kind of step.

    Attributes:
        kind: `mixed` or `decode`. rows, logit_rows: padded, of T and R.
        conditions: what shapes it beside the bucket: profiles of the segment, logit rows.
        contests: of its ops, in their order.
    """

    body: Body
    kind: str
    rows: int
    logit_rows: int
    conditions: str
    contests: tuple[Contest, ...]

    @property
    def bucket_rows(self) -> int:
        """Rows of the symbol that chooses what runs it."""
        return self.rows if self.body.symbol == "T" else self.logit_rows

    def own(self, times: Times) -> str | None:
        """Digest of our fastest kernels for it; None where an op has no time."""
        by_key = {contest.key: times[place_of(contest)] for contest in self.contests}
        return plan_digest(by_key, frozenset(by_key)) if all(by_key.values()) else None

    def outcomes(self, timings: GpuTimings, times: Times) -> tuple[RegionOutcome, ...]:
        """What is known of its segments against our fastest kernels."""
        own = self.own(times)
        return () if own is None else self.known(timings, own)

    def known(self, timings: GpuTimings, own: str = "") -> tuple[RegionOutcome, ...]:
        """What is known of its segments; `own`: against these of our kernels."""
        return timings.get_regions(self.body.digest, self.kind, self.conditions, self.bucket_rows, own)


def region_contests(
    bodies: Mapping[str, Body],
    profiles: Mapping[str, Sequence[SegmentProfile]],
    decisions: Sequence[Contest],
    limits: Limits,
) -> tuple[RegionContest, ...]:
    """Every region at every bucket: of mixed steps, and of decode steps where logits make these other ones.

    Few sequences end their prompt in a mixed step, so a region with logit rows has few of them there, and one
    for each row in a decode step. One whose op has no tactics of ours is in no contest.

    Args:
        bodies: distinct regions by digest. profiles: of their segments.
        decisions: `contests` of all ops.
    """
    places = {place_of(contest): contest for contest in decisions}
    few = min(LOGIT_ROWS, limits.max_batch_size)
    found = []
    for digest, body in bodies.items():
        shape = "; ".join(_profile_text(profile) for profile in profiles[digest])
        keys = [signature_of(node, body.module).key() for node in body.nodes]
        for kind, rows, logit_rows in _buckets(body, limits, few):
            picked = {key: contest_at(key, kind, rows, logit_rows, places) for key in keys}
            contests = [contest for key in keys if (contest := picked[key]) is not None]
            if len(contests) == len(keys):
                text = f"profiles {shape}" + (f"; {logit_rows} logit rows" if "R" in body.symbols else "")
                found.append(RegionContest(body, kind, rows, logit_rows, text, tuple(contests)))
    return tuple(found)


def open_regions(
    regions: Sequence[RegionContest],
    times: Times,
    timings: GpuTimings | None,
    segments: Mapping[str, str],
) -> tuple[RegionContest, ...]:
    """Those of which it is not known how their segment does against our fastest kernels.

    One of whose ops no tactic has a time is not: either its contest is open, or it has lost all of them, and
    nothing is left to time. Where the package was missing when it was timed, a region is open again.

    Args:
        segments: SHA-256 of the segment by the body's digest; regions without one are not open.
    """
    left = []
    for region in regions:
        sha256 = segments.get(region.body.digest)
        if sha256 is None or timings is None or region.own(times) is None:
            continue
        known = region.outcomes(timings, times)
        if not any(o.segment == sha256 and not o.unavailable for o in known):
            left.append(region)
    return tuple(left)


def _buckets(body: Body, limits: Limits, few: int) -> list[tuple[str, int, int]]:
    """Kind, rows and logit rows of every bucket that the region is timed at."""
    if body.symbol == "R":
        return [(MIXED, rows, rows) for rows in buckets(row_limits(limits)["R"])]
    found = [(MIXED, rows, min(rows, few)) for rows in buckets(limits.max_num_tokens)]
    if "R" in body.symbols:
        found += [(DECODE, rows, rows) for rows in decode_buckets(limits)]
    return found


def _profile_text(profile: SegmentProfile) -> str:
    return ", ".join(f"{symbol} {r.least} to {r.most}" for symbol, r in sorted(profile.rows.items()))
