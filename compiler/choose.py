"""Choose tactics for a target and gather the kernels they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tapeout.compiler.cuda_plan import ROW_MULTIPLE, kernels_to_compile, plan_cuda, ranges_of
from tapeout.compiler.ir import Module
from tapeout.compiler.local_gpu import local_gpu
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.plan import max_rows, order_of, signatures_of
from tapeout.compiler.progress import Stage
from tapeout.compiler.tactics.cache import Machine, TimingCache, cpu_conditions
from tapeout.compiler.tactics.gpu_contests import contests
from tapeout.compiler.tactics.gpu_decide import decide, timing_hint
from tapeout.compiler.tactics.gpu_rivals import NO_RIVALS, Rivals
from tapeout.compiler.tactics.select import Choices, choose_untimed, select_tactics
from tapeout.compiler.targets import cuda_target
from tapeout.compiler.tensorrt.competition import Decision, decide_regions, rivals_of, with_times
from tapeout.compiler.tensorrt.segment_plan import SegmentPlan
from tapeout.compiler.tensorrt.segments import segments_for, write_region_models
from tapeout.model_defs import ModelSource
from tapeout.plugins.cpu import HostCpu, TensorType
from tapeout.plugins.cuda import TENSORRT
from tapeout.plugins.errors import UsageError
from tapeout.plugins.native import NATIVE_KERNELS, compile_native, load_native, source_digest
from tapeout.plugins.triton_aot import compile_ahead
from tapeout.runtime.engine.launches import LaunchTable
from tapeout.runtime.engine.manifest import Limits, RegionTime
from tapeout.runtime.engine.program import TacticRange


@dataclass(frozen=True)
class Chosen:
    """Tactics with the kernels they need; launches for CUDA.

    `row_multiple`: rows of the arena's buffers are padded to this many elements.
    `regions`: what TensorRT competed for, bucket by bucket, and who won.
    `workspace_bytes`: GPU memory of the tactics beside the arena; in a dry run without the scratch of
    their kernels, which compiling them tells.
    """

    choices: Choices
    kernels: Mapping[str, bytes]
    launches: LaunchTable | None = None
    row_multiple: int = 1
    warnings: tuple[str, ...] = ()
    workspace_bytes: int = 0
    segments: SegmentPlan | None = None
    regions: tuple[RegionTime, ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Runs of records that a segment may run as one."""
        return self.segments.spans if self.segments else ()

    @property
    def packages(self) -> dict[str, str]:
        """Versions of what wrote the segments."""
        return {s.package: s.version for s in self.segments.segments} if self.segments else {}


def choose_for_cuda(
    source: ModelSource,
    module: Module,
    limits: Limits,
    target: str,
    options: BuildOptions,
    cache: TimingCache,
    stage: Stage,
) -> Chosen:
    """Tactics from the timing cache, timed on a GPU of this machine, or defaults; and their cubins.

    Ops that run within segments alone get no kernels where segments were asked for by name.
    """
    gpu = replace(cuda_target(target), tokens_per_page=limits.tokens_per_page)
    order, dtype = order_of(module), module.values()[module.logits.value].dtype
    if options.keep_onnx is not None and not options.dry_run:
        write_region_models(module, options.keep_onnx)
    segments = segments_for(module, dtype, limits, gpu.sm, target, options, stage.update)
    covered = segments.covered if segments else frozenset()
    signatures = signatures_of(module)
    own = {key: signature for key, signature in signatures.items() if key not in covered}

    def rivals() -> Rivals:
        # Times of segments belong to their bytes, which have a place beside a timing cache alone.
        if segments or options.timing_cache is None:
            return NO_RIVALS
        return rivals_of(module, dtype, limits, gpu.sm, options, stage.update)

    decided = decide(own, order, limits, gpu, target, options, cache, stage.update, rivals)
    timed, chosen = decided.timed, decided.timed.choices
    if segments is None:
        decision = decide_regions(module, limits, gpu.sm, decided.decisions, decided.timings, options)
    else:
        everybody = partial(contests, signatures, limits, gpu, providers=options.providers)
        decision = Decision(with_times(segments, module, limits, everybody, decided.timings))
    segments = decision.plan
    ranges = ranges_of(chosen.mixed)
    for key in covered:
        ranges[key] = (TacticRange(max_rows(signatures[key].outputs[0].shape, limits), TENSORRT),)
    ranges = {key: ranges[key] for key in signatures}
    warnings = (*decided.warnings, *decision.warnings, *(segments.warnings if segments else ()))
    times = decision.times or (segments.times if segments else ())
    is_timed = timed.timed and (segments is None or segments.timed)
    if options.require_timed and timed.timed and not is_timed:
        _refuse_untimed_segments(target, gpu.sm, options)
    choices = Choices(ranges, timed.timings, is_timed, timed.steps)
    if options.dry_run:
        workspace = max(c.workspace_bytes for c in chosen.all())
        return Chosen(choices, {}, None, ROW_MULTIPLE, warnings, workspace, segments, times)
    logits = TensorType(dtype, module.logits.shape)
    plan = plan_cuda(chosen, logits, _known_ids(source, module), limits, gpu, stage.update)
    workspace = plan.table.workspace_bytes + plan.table.scratch_bytes
    table = segments.added_to(plan.table) if segments else plan.table
    built = f", {len(table.segments)} segments" if segments else ""
    kernels = f"{len(table.kernels)} kernels{built}"
    stage.update(f"{timed.known} of {timed.candidates} candidates timed, {kernels}")
    return Chosen(choices, plan.cubins, table, ROW_MULTIPLE, warnings, workspace, segments, times)


def _refuse_untimed_segments(target: str, sm: int, options: BuildOptions) -> None:
    """Raises UsageError; in a dry run only where the build itself would not time them."""
    if options.dry_run and local_gpu(target, sm) is not None:
        return
    cache = options.timing_cache
    state = f"timing cache {cache} lacks some" if cache else "no timing cache was given"
    raise UsageError(
        f"require_timed: not all TensorRT segments have times for {target}; {state}",
        hint=timing_hint(target, options),
    )


def compile_ahead_for_cuda(
    source: ModelSource, module: Module, limits: Limits, target: str, options: BuildOptions
) -> None:
    """Let the processes of `compilers` begin with the kernels that `choose_for_cuda` will ask for: of the
    tactics that the timing cache knows, and of defaults.

    Raises TapeoutError where that would.
    """
    gpu = replace(cuda_target(target), tokens_per_page=limits.tokens_per_page)
    planned = replace(options, dry_run=True)  # nothing is timed, and nothing waits for a kernel
    cache = TimingCache.load(options.timing_cache)
    decided = decide(signatures_of(module), order_of(module), limits, gpu, target, planned, cache)
    logits = TensorType(module.values()[module.logits.value].dtype, module.logits.shape)
    choices, known_ids = decided.timed.choices, _known_ids(source, module)
    compile_ahead(kernels_to_compile(choices, logits, known_ids, limits), gpu.sm)


def _known_ids(source: ModelSource, module: Module) -> int:
    """Ids that may be sampled: those the tokenizer knows."""
    return int(module.logits.shape[1]) if source.tokenizer_json is None else source.tokenizer_vocab_size


def choose_for_cpu(
    module: Module, limits: Limits, host: HostCpu, options: BuildOptions, cache: TimingCache, stage: Stage
) -> Chosen:
    """Tactics from the timing cache, timed where it has no answer, or untimed in a dry run."""
    signatures = signatures_of(module)
    kernels = compile_native(host.level)
    if options.dry_run:
        return Chosen(
            choose_untimed(signatures, limits, host, options.batch_invariant), {NATIVE_KERNELS: kernels}
        )
    machine = Machine(
        cpu=cpu_name(),
        level=host.level,
        threads=host.threads,
        kernels=source_digest(host.level),
        torch=torch.__version__,
        conditions=cpu_conditions(limits),
    )
    torch.set_num_threads(host.threads)
    library = load_native(kernels, host.threads)
    choices = select_tactics(
        signatures,
        limits,
        host,
        machine,
        cache,
        kernels=library,
        seed=options.seed,
        batch_invariant=options.batch_invariant,
        progress=stage.update,
    )
    cache.save()
    stage.update(f"{len(signatures)} signatures, {cache.hits} timings from the cache, {cache.misses} new")
    return Chosen(choices, {NATIVE_KERNELS: kernels})


def cpu_name() -> str:
    """The processor's name, for the timing cache."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")
