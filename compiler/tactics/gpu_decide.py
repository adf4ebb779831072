"""The tactics of a build for a GPU: from the timing cache, timed here where a GPU is at hand, or defaults."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.cuda_plan import choose_cuda, unfit_kernels
from tapeout.compiler.local_gpu import local_gpu
from tapeout.compiler.options import AUTO, BuildOptions
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings, gpus_in, timings_for
from tapeout.compiler.tactics.gpu_contests import Contest, contests
from tapeout.compiler.tactics.gpu_pack import make_pack, write_pack
from tapeout.compiler.tactics.gpu_rivals import NO_RIVALS, Rivals
from tapeout.compiler.tactics.gpu_select import TimedChoices, Unanswered, choose_timed, unanswered
from tapeout.compiler.tactics.gpu_steps import StepContest, step_contests
from tapeout.compiler.tactics.gpu_timed_pack import record
from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import NATIVE, TENSORRT, CudaTarget
from tapeout.plugins.errors import EngineIncompatibleError, UsageError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.tactic_timer.session import time_pack


@dataclass(frozen=True)
class Decided:
    """The choice, and what the user should know about it.

    Attributes:
        decisions: who competed for each op. timings: what is known of them, None for nothing.
    """

    timed: TimedChoices
    warnings: tuple[str, ...]
    decisions: tuple[Contest, ...]
    timings: GpuTimings | None


def decide(
    signatures: Mapping[str, OpSignature],
    order: Sequence[str],
    limits: Limits,
    target: CudaTarget,
    target_name: str,
    options: BuildOptions,
    cache: TimingCache,
    progress: Callable[[str], None] = lambda text: None,
    rivals: Callable[[], Rivals] = Rivals,
) -> Decided:
    """Tactics for every signature, row count and kind of step.

    What the cache does not answer is timed when this machine has a GPU that the target means, and
    added to the cache; a dry run times nothing.

    Args:
        order: keys of the program's ops, as a step runs them.
        rivals: makes the segments that compete with our kernels; called where something can be timed.

    Raises:
        UnsupportedError: ops that no tactic can run on the target.
        UsageError: the cache holds timings of several GPUs that the target could mean, or none of the
            provider that `--tactics` names; or not all that was to be timed, where that is required.
        TapeoutError: all tactics of an op are wrong on the GPU.
    """
    defaults = choose_cuda(signatures, limits, target, batch_invariant=options.batch_invariant)
    decisions = contests(signatures, limits, target, providers=options.providers)
    steps = _steps(signatures, order, decisions, limits, options)
    here = None if options.dry_run else local_gpu(target_name, target.sm)
    try:
        timings = timings_for(cache, target_name, target.sm)
    except UsageError:
        if here is None:
            raise
        timings = GpuTimings(cache, Gpu.of(here))
    warnings: list[str] = []
    if here is not None:
        segments = rivals()
        regions = segments.contests(decisions, limits)
        open_ = unanswered(decisions, timings, _wanted(options), steps, regions, segments.digests)
        if open_.contests:
            timings = GpuTimings(cache, Gpu.of(here))
            open_ = unanswered(decisions, timings, _wanted(options), steps, regions, segments.digests)
            warnings += _time_here(open_, limits, target, target_name, cache, segments, progress)
    unfit: dict[str, str] = {}
    while True:
        timed = choose_timed(
            decisions,
            timings,
            defaults,
            batch_invariant=options.batch_invariant,
            preferred=_wanted(options),
            steps=steps,
        )
        if options.require_timed and not timed.timed:
            _refuse_untimed(timed, warnings, target_name, target.sm, options, cache)
        # What was timed has run; of a default only its compiled kernels tell that it cannot.
        found = {} if options.dry_run else unfit_kernels(timed.choices, target, progress)
        if not found:
            break
        unfit |= found
        defaults = choose_cuda(
            signatures, limits, target, batch_invariant=options.batch_invariant, unfit=unfit
        )
        decisions = contests(signatures, limits, target, unfit, options.providers)
        steps = _steps(signatures, order, decisions, limits, options)
    if (wanted := _wanted(options)) and not options.dry_run:
        _check_wanted(wanted, timed, target_name, options)
    warnings += _warnings(timed, timings, target_name, target.sm, options, cache)
    return Decided(timed, tuple(warnings), decisions, timings)


def open_contests(
    signatures: Mapping[str, OpSignature],
    order: Sequence[str],
    limits: Limits,
    target: CudaTarget,
    target_name: str,
    options: BuildOptions,
    cache: TimingCache,
    rivals: Rivals = NO_RIVALS,
) -> Unanswered:
    """What a pack must hold: all decisions but those that the cache answers already, and all of a bucket
    whose whole step, or the region of a segment that competes, it does not answer.

    Raises UnsupportedError and UsageError as `decide` does.
    """
    choose_cuda(signatures, limits, target, batch_invariant=False)  # refuses what no tactic can run
    decisions = contests(signatures, limits, target, providers=options.providers)
    steps = () if _wanted(options) else step_contests(signatures, order, decisions, limits)
    timings = timings_for(cache, target_name, target.sm)
    regions = rivals.contests(decisions, limits)
    return unanswered(decisions, timings, _wanted(options), steps, regions, rivals.digests)


def _steps(
    signatures: Mapping[str, OpSignature],
    order: Sequence[str],
    decisions: Sequence[Contest],
    limits: Limits,
    options: BuildOptions,
) -> tuple[StepContest, ...]:
    """Whole steps that decide: none where tactics are asked for that need not be the fastest, or where
    segments run most of a step, which no step was timed with."""
    if options.batch_invariant or _wanted(options) or options.tactics == TENSORRT:
        return ()
    return step_contests(signatures, order, decisions, limits)


def _wanted(options: BuildOptions) -> str:
    """The provider of single ops that was asked for by name; "" for none but our own kernels."""
    return "" if options.tactics in {AUTO, NATIVE, TENSORRT} else options.tactics


def _check_wanted(wanted: str, timed: TimedChoices, target: str, options: BuildOptions) -> None:
    if any(c.tactic.provider == wanted for c in timed.choices.all()):
        return
    where = options.timing_cache or "this machine"
    raise UsageError(
        f"tactics: {wanted} was asked for, and {where} has no time of its tactics for {target}",
        hint=f"tapeout build MODEL --target {target} --tactics {wanted} --pack FILE, then tapeout time FILE "
        "where the GPU and the library are (pip install nvidia-cublas)",
    )


def _refuse_untimed(
    timed: TimedChoices,
    warnings: Sequence[str],
    target: str,
    sm: int,
    options: BuildOptions,
    cache: TimingCache,
) -> None:
    """Raises UsageError, but where a build that is no dry run would time what is missing."""
    if options.dry_run and local_gpu(target, sm) is not None:
        return
    if options.timing_cache is None:
        state = "no timing cache was given"
    elif timed.known:
        state = f"timing cache {options.timing_cache} answers the others alone"
    else:
        state = f"timing cache {options.timing_cache}: {_lack(cache, options.timing_cache, sm)}"
    untimed = f"{timed.candidates - timed.known} of {timed.candidates} candidates for {target} have no time"
    defaults = f"{timed.defaults} of {timed.contests} choices would be defaults"
    raise UsageError(
        "\n".join([f"require_timed: {untimed}, {defaults}; {state}", *warnings]),
        hint=timing_hint(target, options),
    )


def timing_hint(target: str, options: BuildOptions) -> str:
    """How to get the times that a build requires and does not find."""
    cache = options.timing_cache or "CACHE.json"
    return (
        f"make a pack with this build's options, tapeout build MODEL --target {target} --pack FILE.pack; "
        f"on the GPU, tapeout time FILE.pack -o {cache}; then build with --timing-cache {cache}. "
        "Or leave out --require-timed"
    )


def _time_here(
    open_: Unanswered,
    limits: Limits,
    target: CudaTarget,
    target_name: str,
    cache: TimingCache,
    rivals: Rivals,
    progress: Callable[[str], None],
) -> list[str]:
    """Pack, time and record; returns warnings."""
    if not open_.contests:
        return []
    file = make_pack(
        open_.contests, limits, target, target_name, progress, open_.steps, open_.regions, rivals
    )
    with tempfile.TemporaryDirectory(prefix="tapeout-") as folder:
        path = Path(folder) / "tactics.pack"
        write_pack(file, path)
        try:
            times = time_pack(path, file.pack, progress=progress)
        except EngineIncompatibleError as error:  # its driver is too old: another machine may run the engine
            return [f"nothing was timed on this machine's GPU: {error.message}"]
    done = record(file.pack, times, cache)
    cache.save()
    return [f"not timed on {done.gpu.name}: {title}: {why}" for title, why in done.skipped.items()]


def _warnings(
    timed: TimedChoices,
    timings: GpuTimings | None,
    target: str,
    sm: int,
    options: BuildOptions,
    cache: TimingCache,
) -> list[str]:
    if timed.timed:
        return []
    if timings is not None and timed.known:
        where = f"timing cache {options.timing_cache}" if options.timing_cache else "timing"
        answered = f"{where} answers {timed.known} of {timed.candidates} candidates for {target}"
        defaults = f"{timed.defaults} of {timed.contests} choices are defaults"
        return [f"{answered} ({timings.gpu.name}); {defaults}"]
    warnings = [f"tactics for {target} are defaults, nothing was timed"]
    if options.timing_cache is not None:
        holds = _lack(cache, options.timing_cache, sm)
        warnings.append(f"timing cache {options.timing_cache} has no timings that serve {target}: {holds}")
    return warnings


def _lack(cache: TimingCache, path: Path, sm: int) -> str:
    """Why a cache answers nothing."""
    if not cache.entries:
        return "it is empty" if path.exists() else "it does not exist"
    others = ", ".join(gpu.text() for gpu in gpus_in(cache, sm))
    return f"it holds those of {others}" if others else f"it holds none of an sm_{sm}"
