"""The tactics of a build for a GPU: from the timing cache, timed here where a GPU is at hand, or defaults."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.cuda_plan import choose_cuda, unfit_kernels
from tapeout.compiler.options import AUTO, BuildOptions
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings, gpus_in, timings_for
from tapeout.compiler.tactics.gpu_contests import Contest, contests
from tapeout.compiler.tactics.gpu_pack import make_pack, write_pack
from tapeout.compiler.tactics.gpu_select import TimedChoices, Unanswered, choose_timed, unanswered
from tapeout.compiler.tactics.gpu_steps import StepContest, step_contests
from tapeout.compiler.tactics.gpu_timing import record
from tapeout.compiler.targets import SKUS
from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import NATIVE, TENSORRT, CudaTarget
from tapeout.plugins.errors import EngineIncompatibleError, UsageError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.target import GpuFacts, is_model
from tapeout.runtime.tactic_timer.session import time_pack


@dataclass(frozen=True)
class Decided:
    """The choice, and what the user should know about it."""

    timed: TimedChoices
    warnings: tuple[str, ...]


def decide(
    signatures: Mapping[str, OpSignature],
    order: Sequence[str],
    limits: Limits,
    target: CudaTarget,
    target_name: str,
    options: BuildOptions,
    cache: TimingCache,
    progress: Callable[[str], None] = lambda text: None,
) -> Decided:
    """Tactics for every signature, row count and kind of step.

    What the cache does not answer is timed when this machine has a GPU that the target means, and
    added to the cache; a dry run times nothing.

    Args:
        order: keys of the program's ops, as a step runs them.

    Raises:
        UnsupportedError: ops that no tactic can run on the target.
        UsageError: the cache holds timings of several GPUs that the target could mean, or none of the
            provider that `--tactics` names.
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
    open_ = unanswered(decisions, timings, _wanted(options), steps)
    if open_.contests and here is not None:
        timings = GpuTimings(cache, Gpu.of(here))
        open_ = unanswered(decisions, timings, _wanted(options), steps)
        warnings += _time_here(open_, limits, target, target_name, cache, progress)
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
        # What was timed has run; of a default only its compiled kernels tell that it cannot.
        found = {} if options.dry_run else unfit_kernels(timed.choices, target)
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
    return Decided(timed, (*warnings, *_warnings(timed, timings, target_name, target.sm, options, cache)))


def open_contests(
    signatures: Mapping[str, OpSignature],
    order: Sequence[str],
    limits: Limits,
    target: CudaTarget,
    target_name: str,
    options: BuildOptions,
    cache: TimingCache,
) -> Unanswered:
    """What a pack must hold: all decisions but those that the cache answers already, and all of a bucket
    whose whole step it does not answer.

    Raises UnsupportedError and UsageError as `decide` does.
    """
    choose_cuda(signatures, limits, target, batch_invariant=False)  # refuses what no tactic can run
    decisions = contests(signatures, limits, target, providers=options.providers)
    steps = () if _wanted(options) else step_contests(signatures, order, decisions, limits)
    return unanswered(decisions, timings_for(cache, target_name, target.sm), _wanted(options), steps)


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


def local_gpu(target: str, sm: int) -> GpuFacts | None:
    """The first GPU of this machine, if it is one that the target means; nothing is allocated on it."""
    try:
        from tapeout.runtime.executors.cuda.driver import open_device

        facts = open_device().facts
    except (ImportError, EngineIncompatibleError):
        return None
    sku = target.removeprefix("cuda:")
    meant = facts.sm == sm and (sku not in SKUS or is_model(facts.name, sku))
    return facts if meant else None


def _time_here(
    open_: Unanswered,
    limits: Limits,
    target: CudaTarget,
    target_name: str,
    cache: TimingCache,
    progress: Callable[[str], None],
) -> list[str]:
    """Pack, time and record; returns warnings."""
    if not open_.contests:
        return []
    file = make_pack(open_.contests, limits, target, target_name, progress, open_.steps)
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
        others = ", ".join(gpu.text() for gpu in gpus_in(cache, sm))
        holds = f"it holds those of {others}" if others else f"it holds none of an sm_{sm}"
        warnings.append(f"timing cache {options.timing_cache} has no timings that serve {target}: {holds}")
    return warnings
