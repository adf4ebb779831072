"""Segments that compete with our own kernels: built for a pack, taken from what is kept where they won."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapeout.compiler.ir import Module
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.regions import Body, distinct_bodies, find_regions
from tapeout.compiler.tactics.gpu_cache import DIGEST_LENGTH, GpuTimings, RegionOutcome, wins
from tapeout.compiler.tactics.gpu_contests import Contest
from tapeout.compiler.tactics.gpu_regions import RegionContest, region_contests
from tapeout.compiler.tactics.gpu_rivals import NO_RIVALS, Rivals
from tapeout.compiler.tactics.gpu_select import times_alone
from tapeout.compiler.tensorrt.choice import package_for, version_number
from tapeout.compiler.tensorrt.segment_cache import SegmentCache, kept_folder
from tapeout.compiler.tensorrt.segment_plan import BuiltBody, Ranges, SegmentPlan, segment_plan, uses_of
from tapeout.compiler.tensorrt.segments import (
    build_bodies,
    cache_paths,
    kept_bodies,
    profiles_of,
)
from tapeout.plugins.cuda import NATIVE, TENSORRT
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.launches import RegionRange
from tapeout.runtime.engine.manifest import Limits, RegionTime
from tapeout.runtime.tactic_timer.pack import DECODE, PackedSegment
from tapeout.runtime.tensorrt.package import FULL, installed_version

_NOT_TIMED = "not timed against our kernels as they are now"


def rivals_of(
    module: Module,
    dtype: str,
    limits: Limits,
    sm: int,
    options: BuildOptions,
    progress: Callable[[str], None],
) -> Rivals:
    """The segments of a model's regions, for a pack: kept ones, others are built.

    With `--tactics auto` there are none where they cannot be made, and `absent` says why.

    Raises as `choose_package` and `build_segments` do, where TensorRT was asked for by name.
    """
    if not options.segments_compete:
        return NO_RIVALS
    try:
        package, gpu = package_for(sm, options.target, dtype)
        version = installed_version(package) or ""
        kept, own_timings = cache_paths(options.timing_cache, package)
        bodies = distinct_bodies(find_regions(module))
        cache = SegmentCache(kept, package, version, sm, gpu)
        built = build_bodies(bodies, limits, cache, own_timings, progress)
    except TapeoutError as error:
        if options.tactics == TENSORRT:
            raise
        return Rivals(absent=error.message)
    packed = {
        digest: PackedSegment(
            its.segment(package, version), its.sha256, its.key, gpu, round(its.built.seconds, 3)
        )
        for digest, its in built.items()
    }
    return Rivals(bodies, packed, {its.blob: its.built.plan for its in built.values()})


@dataclass(frozen=True)
class Decision:
    """What runs regions, with what was measured; `plan` None: our kernels in every step."""

    plan: SegmentPlan | None
    times: tuple[RegionTime, ...] = ()
    warnings: tuple[str, ...] = ()


def decide_regions(
    module: Module,
    limits: Limits,
    sm: int,
    decisions: Sequence[Contest],
    timings: GpuTimings | None,
    options: BuildOptions,
) -> Decision:
    """For every region and bucket the segment where it was measured faster than our kernels, else these.

    Only segments are taken that lie beside the timing cache with the bytes that were timed: nothing is built.

    Args:
        decisions: who competed for the ops, with `timings` as in `choose_timed`.
    """
    if not options.segments_compete or timings is None or not timings.knows_regions():
        return Decision(None)
    regions = find_regions(module)
    bodies = distinct_bodies(regions)
    contests = _contests(bodies, decisions, limits)
    times = times_alone(decisions, timings)
    known = {_place(contest): contest.outcomes(timings, times) for contest in contests}
    builders = {
        outcome.builder for outcomes in known.values() for outcome in outcomes if not outcome.unavailable
    }
    if not any(known.values()):
        return Decision(None)
    folder = kept_folder(options.timing_cache) if options.timing_cache is not None else None
    built, builder = _newest_kept(bodies, limits, sm, folder, builders, _timed_segments(known))
    uses = uses_of(regions)
    told = [
        _region_time(contest, uses, _outcome(known[_place(contest)], built.get(contest.body.digest)))
        for contest in contests
    ]
    won = {
        contest.body.digest for contest, time in zip(contests, told, strict=True) if time.winner == TENSORRT
    }
    warnings = _missing(known, built, folder)
    if not won:
        return Decision(None, tuple(told), warnings)
    taken = {digest: its for digest, its in built.items() if digest in won}
    ranges = {digest: _ranges(its, contests, told) for digest, its in taken.items()}
    plan = segment_plan(module, regions, taken, builder[0], builder[1], ranges)
    return Decision(replace(plan, covered=frozenset(), times=tuple(told), timed=True), tuple(told), warnings)


def with_times(
    plan: SegmentPlan,
    module: Module,
    limits: Limits,
    decisions: Callable[[], Sequence[Contest]],
    timings: GpuTimings | None,
) -> SegmentPlan:
    """A plan of segments in every step, with what was measured of them.

    `decisions`: who competes for all ops, made where something is known.
    """
    if not plan.segments or timings is None or not timings.knows_regions():
        return plan
    regions = find_regions(module)
    bodies = distinct_bodies(regions)
    uses = uses_of(regions)
    sha256 = {
        digest: hashlib.sha256(plan.blobs[segment.blob]).hexdigest()
        for digest, segment in zip(bodies, plan.segments, strict=True)
    }
    told = []
    for contest in _contests(bodies, decisions(), limits):
        known = [o for o in contest.known(timings) if o.segment == sha256[contest.body.digest]]
        outcome = next((o for o in known if o.time_us is not None), known[0] if known else None)
        told.append(replace(_region_time(contest, uses, outcome), winner=TENSORRT))
    if all(time.reason == _NOT_TIMED for time in told):
        return plan
    return replace(plan, times=tuple(told), timed=all(time.segment_us is not None for time in told))


def _contests(
    bodies: Mapping[str, Body], decisions: Sequence[Contest], limits: Limits
) -> tuple[RegionContest, ...]:
    profiles = {digest: profiles_of(body, limits) for digest, body in bodies.items()}
    return region_contests(bodies, profiles, decisions, limits)


def _place(contest: RegionContest) -> tuple[str, str, int]:
    return contest.body.digest, contest.kind, contest.bucket_rows


def _newest_kept(
    bodies: Mapping[str, Body],
    limits: Limits,
    sm: int,
    folder: Path | None,
    builders: set[tuple[str, str, str]],
    wanted: Mapping[str, Sequence[str]],
) -> tuple[dict[str, BuiltBody], tuple[str, str, str]]:
    """Segments of one builder, since an engine loads one: full TensorRT before TensorRT-RTX, as when they are
    built, then the newest of which any is kept."""
    for builder in sorted(builders, key=lambda b: (b[0] == FULL, version_number(b[1]), b[2]), reverse=True):
        package, version, gpu = builder
        cache = SegmentCache(folder, package, version, sm, gpu)
        if built := kept_bodies(bodies, limits, cache, wanted):
            return built, builder
    return {}, ("", "", "")


def _timed_segments(
    known: Mapping[tuple[str, str, int], Sequence[RegionOutcome]],
) -> dict[str, list[str]]:
    """By region the SHA-256s of segments, the best first: timed at most buckets, then the fastest there.

    There are several where one region was built for two packs.
    """
    times: dict[str, dict[str, list[float]]] = {}
    for (digest, _, _), outcomes in known.items():
        for outcome in outcomes:
            if outcome.time_us is not None:
                times.setdefault(digest, {}).setdefault(outcome.segment, []).append(outcome.time_us)
    return {
        digest: sorted(its, key=lambda sha256: (-len(its[sha256]), sum(its[sha256]), sha256))
        for digest, its in times.items()
    }


def _outcome(known: Sequence[RegionOutcome], built: BuiltBody | None) -> RegionOutcome | None:
    """What is known of the segment that is at hand; where there is none, why another was not timed."""
    sha256 = "" if built is None else built.sha256
    mine = [outcome for outcome in known if outcome.segment == sha256]
    reasons = [outcome for outcome in known if outcome.time_us is None]
    return next(iter([*mine, *(reasons if built is None else [])]), None)


def _region_time(
    contest: RegionContest, uses: Mapping[str, int], outcome: RegionOutcome | None
) -> RegionTime:
    body = contest.body
    return RegionTime(
        digest=body.digest[:DIGEST_LENGTH],
        regions=uses[body.digest],
        ops=tuple(node.op for node in body.nodes),
        kind=contest.kind,
        rows=contest.rows,
        logit_rows=contest.logit_rows,
        winner=TENSORRT if outcome and wins(outcome.time_us, outcome.own_us) else NATIVE,
        segment_us=outcome.time_us if outcome else None,
        own_us=outcome.own_us if outcome else None,
        reason=(outcome.reason or "") if outcome else _NOT_TIMED,
    )


def _ranges(its: BuiltBody, contests: Sequence[RegionContest], told: Sequence[RegionTime]) -> Ranges:
    """By kind of step: the profile that serves each bucket which the segment has won."""
    rows: dict[bool, list[RegionRange]] = {False: [], True: []}
    segment = its.segment("", "")
    for contest, time in zip(contests, told, strict=True):
        if contest.body.digest != its.body.digest:
            continue
        profile = segment.profile_at({"T": contest.rows, "R": contest.logit_rows})
        chosen = RegionRange(contest.bucket_rows, profile if time.winner == TENSORRT else -1)
        row = rows[contest.kind == DECODE]
        if row and row[-1].profile == chosen.profile:
            row.pop()
        row.append(chosen)
    return Ranges(tuple(rows[False]), tuple(rows[True]))


def _missing(
    known: Mapping[tuple[str, str, int], Sequence[RegionOutcome]],
    built: Mapping[str, BuiltBody],
    folder: Path | None,
) -> tuple[str, ...]:
    """A warning where segments have won that are not at hand, and those at hand were not timed."""
    lost = set()
    for (digest, _, _), outcomes in known.items():
        at_hand = digest in built and any(o.segment == built[digest].sha256 for o in outcomes)
        if not at_hand and any(wins(o.time_us, o.own_us) for o in outcomes):
            lost.add(digest)
    if not lost:
        return ()
    where = "no timing cache is named" if folder is None else f"{folder} does not hold them"
    text = f"segments of {len(lost)} distinct regions were timed to be faster and are not taken: {where}"
    return (f"{text}; our kernels run there",)
