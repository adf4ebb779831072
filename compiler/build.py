"""`tapeout build`: from a model to an engine file, stage by stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from tapeout.compiler.alignment import check_alignment
from tapeout.compiler.choose import Chosen, choose_for_cpu, choose_for_cuda
from tapeout.compiler.describe import describe, memory_plan, texts_of, warnings_of
from tapeout.compiler.engine_writer import stage_engine
from tapeout.compiler.front_end import FrontEnd, Lowered, Stages
from tapeout.compiler.graph import Graph
from tapeout.compiler.limits import resolve_target
from tapeout.compiler.local_gpu import local_gpu
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.outputs import check_apart, check_outputs
from tapeout.compiler.parity import NO_GPU, SKIPPED, Parity, compare, of_segments
from tapeout.compiler.peak_memory import peak_memory_bytes
from tapeout.compiler.plan import plan_program
from tapeout.compiler.progress import Progress, SilentProgress, of_bytes
from tapeout.compiler.recipe_book import FACTS_TEXT, RECIPES_TEXT, facts_text, recipes_text
from tapeout.compiler.report import BuildReport, MemoryPlan, report_path
from tapeout.compiler.shared_weights import SharedWeights, others_beside
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.targets import cuda_target
from tapeout.compiler.tensorrt.choice import check_segments
from tapeout.model_defs import ModelSource
from tapeout.model_defs.weights import CONST_PREFIX
from tapeout.plugins.cpu import HostCpu
from tapeout.plugins.native import detect_host
from tapeout.runtime.engine.manifest import Manifest


def build(
    model: str,
    output: Path,
    options: BuildOptions,
    progress: Progress | None = None,
    inputs: tuple[Path, ...] = (),
    *,
    front_end: FrontEnd | None = None,
    timing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ahead: Callable[[], None] | None = None,
) -> BuildReport:
    """Build `model` into the engine file `output`.

    Args:
        model: HF directory, hub id or .gguf file.
        progress: told about stages; None for silence.
        inputs: files beside the model that must not be overwritten (the options' file).
        front_end: of the model, where several engines are made of it; None for one of this build's own.
        timing: entered while tactics are chosen and, if they must be, timed on this machine.
        ahead: called afterwards: other engines' work may begin beside the rest of this build.

    Returns:
        The report, also written to `output.report.json`. With `options.dry_run` nothing is written
        and no tactic is timed.

    Raises:
        TapeoutError: see its subclasses; nothing appears under `output` then.
    """
    stages = Stages(progress or SilentProgress())
    check_outputs(output, options, inputs)
    check_segments(options)
    host = detect_host()
    cache = TimingCache.load(options.timing_cache)
    with ExitStack() as stack:

        def begin(source: ModelSource) -> None:
            check_apart(output, options, source.files)
            if _hashes_ahead(source, output, options):
                stack.enter_context(source.checkpoint.hashes.ahead())

        front = (front_end or FrontEnd(model)).lower(options, stages, begin)
        return _build(front, output, options, stages, host, cache, timing, ahead)


def _build(
    front: Lowered,
    output: Path,
    options: BuildOptions,
    stages: Stages,
    host: HostCpu,
    cache: TimingCache,
    timing: Callable[[], AbstractContextManager[object]],
    ahead: Callable[[], None] | None,
) -> BuildReport:
    """The stages after those that every engine of a model shares."""
    source, graph, module, limits = front.source, front.graph, front.module, front.limits
    target = resolve_target(options, host)
    on_cpu = target.startswith("cpu:")
    weights, read = {name: graph.weights[name] for name in module.weights}, _reader(source, graph)
    with ExitStack() as stack:  # whatever fails in here leaves no engine and no temporary file
        shared = None
        if options.weights == "shared" and not options.dry_run:
            shared = SharedWeights(output, weights, read, source.checkpoint.digest, source.checkpoint.hashes)
            if not on_cpu and local_gpu(target, cuda_target(target).sm) is None:
                stack.enter_context(shared.ahead())  # nothing is timed that this could disturb
                # Left first: what waits for the hashes does not outlive a build that fails.
                stack.enter_context(source.checkpoint.hashes.giving_up())
        hashed = shared is None and not options.dry_run
        if hashed and on_cpu:
            _hash(source, stages)  # nothing else may run while tactics are timed on these cores
        with stages("tactics", target) as stage, timing():
            if on_cpu:
                chosen = choose_for_cpu(module, limits, host, options, cache, stage)
            else:
                chosen = choose_for_cuda(source, module, limits, target, options, cache, stage)
        if ahead is not None:
            with stages("ahead"):
                ahead()
        if shared is not None:
            with stages("weights", "the file beside the engine") as stage:
                shared.result(of_bytes(stage))
        if hashed and not on_cpu:
            _hash(source, stages)
        weights_digest = "" if options.dry_run else source.checkpoint.digest()
        program = plan_program(
            module, limits, chosen.choices.ranges, row_multiple=chosen.row_multiple, spans=chosen.spans
        )
        if chosen.row_multiple > 1:
            check_alignment(program)
        manifest = describe(
            source,
            module,
            options,
            target,
            front.dtype,
            limits,
            front.matches,
            chosen.choices.timed,
            weights_digest,
            chosen.packages,
            chosen.regions,
        )
        memory = memory_plan(weights, program, manifest, chosen.workspace_bytes)
        report = _report(output, options, manifest, memory, chosen)
        if options.dry_run:
            return _finished(stages, replace(report, file_bytes=_planned_files(report, options, chosen)))

        texts = texts_of(source, module)
        texts |= {RECIPES_TEXT: recipes_text(source, weights, read), FACTS_TEXT: facts_text(source)}
        with stages("write", str(output)) as stage:
            staged = stack.enter_context(
                stage_engine(
                    output,
                    manifest,
                    program,
                    weights,
                    read,
                    chosen.kernels,
                    texts,
                    source_digest=weights_digest,
                    shared=shared,
                    launches=chosen.launches,
                    segments=chosen.segments.blobs if chosen.segments else {},
                    progress=of_bytes(stage),
                )
            )
        verdict = _verify(options, target, stages, lambda: compare(source, staged.path, front.find_weight))
        if chosen.segments:
            verdict = of_segments(verdict, timed=chosen.segments.timed)
        report = _finished(
            stages,
            replace(
                report,
                file_bytes=staged.result.file_bytes,
                section_bytes=dict(staged.result.sizes),
                parity={**verdict.manifest, **verdict.figures},
            ),
        )
        staged.commit(replace(manifest, parity=verdict.manifest), (report_path(output), report.text()))
    return report


def _hashes_ahead(source: ModelSource, output: Path, options: BuildOptions) -> bool:
    """Not where nobody asks for hashes, nor where they are made while a weight file is written."""
    if options.dry_run:
        return False
    return options.weights != "shared" or not source.checkpoint.hashes.see_reads or others_beside(output)


def _hash(source: ModelSource, stages: Stages) -> None:
    """Wait for what has been hashed beside the stages before."""
    with stages("hash", "the checkpoint's tensors"):
        source.checkpoint.hashes.result()


def _verify(options: BuildOptions, target: str, stages: Stages, comparison: Callable[[], Parity]) -> Parity:
    """The comparison with Hugging Face, or why there is none."""
    if not options.verify:
        return SKIPPED
    if target.startswith("cuda:"):
        return NO_GPU
    with stages("parity", "Hugging Face against the engine"):
        return comparison()


def _planned_files(report: BuildReport, options: BuildOptions, chosen: Chosen) -> dict[str, int]:
    """About what would be written: weights and kernels; texts and program are small beside them."""
    kernels = sum(map(len, chosen.kernels.values()))
    weights = report.memory.weights_bytes
    if options.weights == "shared":
        return {report.engine.name: kernels, "shared weights": weights}
    return {report.engine.name: kernels + weights}


def _reader(source: ModelSource, graph: Graph) -> Callable[[str], np.ndarray]:
    """Sources of recipes: checkpoint tensors, and constants the trace found."""

    def read(name: str) -> np.ndarray:
        if name.startswith(CONST_PREFIX):
            return graph.constants[name.removeprefix(CONST_PREFIX)]
        return source.checkpoint.read(name)

    return read


def _report(
    output: Path, options: BuildOptions, manifest: Manifest, memory: MemoryPlan, chosen: Chosen
) -> BuildReport:
    """What is known before anything is written."""
    return BuildReport(
        engine=output,
        dry_run=options.dry_run,
        target=manifest.target,
        dtype=manifest.model.dtype,
        quantize=manifest.model.quantize,
        limits=manifest.limits,
        memory=memory,
        file_bytes={},
        section_bytes={},
        stage_seconds={},
        peak_memory_bytes=0,
        passes=manifest.passes,
        tactics=chosen.choices.timings,
        timed=chosen.choices.timed,
        parity={},
        options=options.effective(),
        warnings=(*chosen.warnings, *warnings_of(manifest)),
        steps=chosen.choices.steps,
        segments=chosen.segments.reports if chosen.segments else (),
        regions=chosen.regions,
    )


def _finished(stages: Stages, report: BuildReport) -> BuildReport:
    """The report with times and peak memory."""
    return replace(report, stage_seconds=dict(stages.seconds), peak_memory_bytes=peak_memory_bytes())
