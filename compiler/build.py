"""`tapeout build`: from a model to an engine file, stage by stage."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tapeout.compiler.cuda_plan import plan_cuda
from tapeout.compiler.describe import describe, memory_plan, texts_of
from tapeout.compiler.engine_writer import check_output, stage_engine
from tapeout.compiler.graph import Graph
from tapeout.compiler.ir import Module
from tapeout.compiler.limits import resolve_dtype, resolve_limits, resolve_target
from tapeout.compiler.lower import lower
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.parity import NO_GPU, SKIPPED, compare
from tapeout.compiler.pipeline import expected_matches, passes_for, run_passes
from tapeout.compiler.plan import plan_program, signatures_of
from tapeout.compiler.progress import Progress, SilentProgress, Stage
from tapeout.compiler.report import BuildReport, MemoryPlan, report_path, write_report
from tapeout.compiler.tactics.cache import Machine, TimingCache
from tapeout.compiler.tactics.select import Choices, choose_untimed, select_tactics
from tapeout.compiler.targets import cuda_target
from tapeout.compiler.trace import INTERFACE, trace
from tapeout.model_defs import ModelSource, TensorInfo, open_model
from tapeout.model_defs.check_checkpoint import check_checkpoint
from tapeout.model_defs.meta_model import expected_tensors, load_meta_model
from tapeout.model_defs.weights import CONST_PREFIX
from tapeout.plugins.cpu import HostCpu, TensorType
from tapeout.plugins.native import compile_native, detect_host, load_native, source_digest
from tapeout.runtime.engine.launches import LaunchTable
from tapeout.runtime.engine.manifest import Limits, Manifest

NATIVE_KERNELS = "native.so"
FindTensor = Callable[[str], TensorInfo]


def build(model: str, output: Path, options: BuildOptions, progress: Progress | None = None) -> BuildReport:
    """Build `model` into the engine file `output`.

    Args:
        model: HF directory, hub id or .gguf file.
        progress: told about stages; None for silence.

    Returns:
        The report, also written to `output.report.json`. With `options.dry_run` nothing is written
        and no tactic is timed.

    Raises:
        TapeoutError: see its subclasses; nothing appears under `output` then.
    """
    stages = _Stages(progress or SilentProgress())
    if not options.dry_run:
        check_output(output)
    host = detect_host()
    cache = TimingCache.load(options.timing_cache)
    with stages("config", model):
        source = open_model(model, trust_remote_code=options.trust_remote_code, revision=options.revision)
        limits = resolve_limits(options, source.config.get_text_config())
        dtype = resolve_dtype(options, source.config)
    with stages("trace", f"{source.config.model_type}, {dtype}"):
        graph, find_tensor = trace_source(source, dtype)
    with stages("passes") as stage:
        matches = run_passes(graph, passes_for(options), expected_matches(source.config), dump=options.dump)
        module = lower(graph)
        stage.update(f"{len(module.nodes)} ops")
    target = resolve_target(options, host)
    with stages("tactics", target) as stage:
        if target.startswith("cuda:"):
            chosen = _choose_cuda(source, module, limits, target)
        else:
            chosen = _choose_cpu(module, limits, host, options, cache, stage)
    choices = chosen.choices
    program = plan_program(module, limits, choices.ranges)
    manifest = describe(source, module, options, target, dtype, limits, matches, choices.timed)
    weights = {name: graph.weights[name] for name in module.weights}
    memory = memory_plan(weights, program, manifest)
    report = _report(output, options, manifest, memory, choices)
    if options.dry_run:
        return stages.finish(replace(report, file_bytes={output.name: memory.weights_bytes}))

    with stages("write", str(output)) as stage:
        staged = stage_engine(
            output,
            manifest,
            program,
            weights,
            _reader(source, graph),
            chosen.kernels,
            texts_of(source, module),
            source_digest=source.checkpoint.digest(),
            shared=options.weights == "shared",
            launches=chosen.launches,
            progress=lambda done, total: stage.update(f"{done / total:.0%} of {total:,} bytes"),
        )
    with staged:  # whatever fails from here on leaves nothing behind
        verdict = SKIPPED
        if target.startswith("cuda:"):
            verdict = NO_GPU
        elif options.verify:
            with stages("parity", "Hugging Face against the engine"):
                verdict = compare(source, staged.path, find_tensor)
        result = staged.commit(replace(manifest, parity=verdict.manifest))
    report = replace(
        report,
        file_bytes={path.name: path.stat().st_size for path in result.paths},
        section_bytes=dict(result.sizes),
        parity={**verdict.manifest, **verdict.figures},
    )
    report = stages.finish(report)
    write_report(report, report_path(output))
    return report


def trace_source(source: ModelSource, dtype: str) -> tuple[Graph, FindTensor]:
    """Trace a model after checking its checkpoint; also gives the tensor that fills a parameter."""
    model = load_meta_model(source, dtype, INTERFACE)
    expected, tied = expected_tensors(model)
    check_checkpoint(source, expected, tied)
    tensors = source.checkpoint.tensors

    def find_tensor(name: str) -> TensorInfo:
        return tensors[name] if name in tensors else tensors[tied[name]]

    return trace(model, find_tensor), find_tensor


@dataclass(frozen=True)
class _Chosen:
    """Tactics with the kernels they need; launches for CUDA."""

    choices: Choices
    kernels: Mapping[str, bytes]
    launches: LaunchTable | None = None


def _choose_cuda(source: ModelSource, module: Module, limits: Limits, target: str) -> _Chosen:
    """Default tactics and their cubins: nothing is timed yet, which the manifest says."""
    gpu = replace(cuda_target(target), tokens_per_page=limits.tokens_per_page)
    dtype = module.values()[module.logits.value].dtype
    known_ids = int(module.logits.shape[1]) if source.tokenizer_json is None else source.tokenizer_vocab_size
    plan = plan_cuda(signatures_of(module), TensorType(dtype, module.logits.shape), known_ids, limits, gpu)
    return _Chosen(Choices(plan.ranges, (), timed=False), plan.cubins, plan.table)


def _choose_cpu(
    module: Module, limits: Limits, host: HostCpu, options: BuildOptions, cache: TimingCache, stage: Stage
) -> _Chosen:
    """Tactics from the timing cache, timed where it has no answer, or untimed in a dry run."""
    signatures = signatures_of(module)
    kernels = compile_native(host.level)
    if options.dry_run:
        return _Chosen(
            choose_untimed(signatures, limits, host, options.batch_invariant), {NATIVE_KERNELS: kernels}
        )
    machine = Machine(
        cpu=cpu_name(),
        level=host.level,
        threads=host.threads,
        kernels=source_digest(host.level),
        torch=torch.__version__,
        conditions=f"batch {limits.max_batch_size}, length {limits.max_seq_len}, "
        f"page {limits.tokens_per_page}",
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
    return _Chosen(choices, {NATIVE_KERNELS: kernels})


def cpu_name() -> str:
    """The processor's name, for the timing cache."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


def _reader(source: ModelSource, graph: Graph) -> Callable[[str], np.ndarray]:
    """Sources of recipes: checkpoint tensors, and constants the trace found."""

    def read(name: str) -> np.ndarray:
        if name.startswith(CONST_PREFIX):
            return graph.constants[name.removeprefix(CONST_PREFIX)]
        return source.checkpoint.read(name)

    return read


def _report(
    output: Path, options: BuildOptions, manifest: Manifest, memory: MemoryPlan, choices: Choices
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
        tactics=choices.timings,
        timed=choices.timed,
        parity={},
        options=options.effective(),
    )


class _Stages:
    """Times stages and tells the listener."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, detail: str = "") -> Iterator[Stage]:
        start = time.perf_counter()
        with self.progress.stage(name, detail) as stage:
            yield stage
        self.seconds[name] = time.perf_counter() - start

    def finish(self, report: BuildReport) -> BuildReport:
        """The report with times and peak memory."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return replace(report, stage_seconds=dict(self.seconds), peak_memory_bytes=peak)
