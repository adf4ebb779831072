"""The stages every build begins with: from a model to lowered IR, whatever is made of it afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from tapeout.compiler.graph import Graph
from tapeout.compiler.interface import INTERFACE
from tapeout.compiler.ir import Module
from tapeout.compiler.limits import resolve_dtype, resolve_limits, target_kind
from tapeout.compiler.lower import lower
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.pipeline import expected_matches, passes_for, run_passes
from tapeout.compiler.progress import Progress, Stage
from tapeout.compiler.trace import FindWeight, trace
from tapeout.model_defs import ModelSource, open_model
from tapeout.model_defs.architecture import calls_interface, written_attention
from tapeout.model_defs.check_checkpoint import check_checkpoint
from tapeout.model_defs.config_use import check_config_use, recording_reads
from tapeout.model_defs.conversion import converted
from tapeout.model_defs.meta_model import expected_tensors, load_meta_model
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.triton_aot.digest import triton_version
from tapeout.runtime.engine.manifest import Limits


class Stages:
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


@dataclass(frozen=True)
class Lowered:
    """A model as IR, and what was resolved on the way.

    `find_weight` gives the recipe that fills a parameter; `matches` counts by pass.
    """

    source: ModelSource
    graph: Graph
    find_weight: FindWeight
    module: Module
    limits: Limits
    dtype: str
    matches: Mapping[str, int]


class FrontEnd:
    """A model that is opened once, traced once for each precision and lowered once for each list of passes,
    however many engines are made of it."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._source: tuple[tuple[object, ...], ModelSource] | None = None
        self._traces: dict[tuple[object, ...], tuple[Graph, FindWeight]] = {}
        self._lowered: dict[tuple[object, ...], Lowered] = {}

    def lower(
        self, options: BuildOptions, stages: Stages, check_source: Callable[[ModelSource], None]
    ) -> Lowered:
        """The model for a build with these options; see `lower_model`. What was done before is no stage."""
        with stages("config", self._model):
            source = self._open(options)
            check_source(source)
            limits = resolve_limits(options, source.config.get_text_config())
            dtype = resolve_dtype(options, source.config)
            if target_kind(options) == "cuda":
                triton_version()  # without the kernels' compiler there is no point in tracing
        traced = (dtype, limits.max_seq_len)
        if traced not in self._traces:
            with stages("trace", f"{source.config.model_type}, {dtype}"):
                self._traces[traced] = trace_source(source, dtype, limits.max_seq_len)
        passes = passes_for(options)
        if (*traced, passes) not in self._lowered or options.dump is not None:
            with stages("passes") as stage:
                traced_graph, find_weight = self._traces[traced]
                graph, expected = traced_graph.copy(), expected_matches(source.config, passes)
                matches = run_passes(graph, passes, expected, dump=options.dump)
                module = lower(graph)
                stage.update(f"{len(module.nodes)} ops")
            self._lowered[*traced, passes] = Lowered(
                source, graph, find_weight, module, limits, dtype, matches
            )
        return replace(self._lowered[*traced, passes], limits=limits)

    def _open(self, options: BuildOptions) -> ModelSource:
        how = (options.trust_remote_code, options.revision)
        if self._source is None or self._source[0] != how:
            self._traces, self._lowered = {}, {}
            source = open_model(
                self._model, trust_remote_code=options.trust_remote_code, revision=options.revision
            )
            self._source = how, source
        return self._source[1]


def lower_model(
    model: str, options: BuildOptions, stages: Stages, check_source: Callable[[ModelSource], None]
) -> Lowered:
    """Open, trace, fuse and lower a model; `check_source` may refuse it as soon as it is open."""
    return FrontEnd(model).lower(options, stages, check_source)


def trace_source(source: ModelSource, dtype: str, max_seq_len: int | None = None) -> tuple[Graph, FindWeight]:
    """Trace a model after checking its checkpoint; also gives the recipe that fills a parameter.

    `max_seq_len`: see `load_meta_model`.
    """
    implementation = INTERFACE if calls_interface(source.config) else written_attention(source.config)
    with recording_reads(source.config) as read:
        model = load_meta_model(source, dtype, implementation, max_seq_len)
        graph, find_weight = _trace(source, model)
    if not source.trust_remote_code:
        check_config_use(source.raw_config, source.config, read, f"{source.hf_path}/config.json")
    return graph, find_weight


def _trace(source: ModelSource, model: nn.Module) -> tuple[Graph, FindWeight]:
    expected, tied = expected_tensors(model)
    tensors = source.checkpoint.tensors
    parts = {name for ref in source.recipes.values() for name in ref.source_names()}
    own_names = {name: info for name, info in tensors.items() if name not in parts}
    recipes = {**source.recipes, **converted(model, own_names, expected)}
    check_checkpoint(source, expected, tied, recipes)

    def find_weight(name: str) -> WeightRef:
        for candidate in (name, tied.get(name, name)):
            if candidate in tensors and candidate in expected:
                return WeightRef.of(tensors[candidate])
            if candidate in recipes:
                return recipes[candidate]
        raise KeyError(name)

    return trace(model, find_weight), find_weight
