"""Fixtures of the compiler's tests: tiny models traced once a session, small graphs made by hand."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tapeout.compiler import build as build_module
from tapeout.compiler import build_pack as build_pack_module
from tapeout.compiler.front_end import FrontEnd
from tapeout.compiler.graph import Graph, read_weights, run_graph
from tapeout.compiler.ir import Module
from tapeout.compiler.lower import lower
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.pipeline import Pass, expected_matches, passes_for, run_passes
from tapeout.model_defs import ModelSource, open_model
from tapeout.model_defs.weights import CONST_PREFIX, run_recipe

# Tests are imported by path (importlib mode), so their shared helpers need a place to be found.
sys.path.insert(0, str(Path(__file__).parent))

from small_graph import SmallGraph, ops

TOKENS_PER_PAGE = 4

# torch writes thousands of structured records an export; formatting them for pytest's log capture
# would take a good part of the tests' time.
logging.getLogger("torch.__trace").propagate = False


def reader(source: ModelSource, graph: Graph) -> Callable[[str], np.ndarray]:
    """Reads the sources of recipes."""

    def read(name: str) -> np.ndarray:
        if name.startswith(CONST_PREFIX):
            return graph.constants[name.removeprefix(CONST_PREFIX)]
        return source.checkpoint.read(name)

    return read


@dataclass(frozen=True)
class Packed:
    """Sequences packed into one step, and where they lie in a paged cache whose pages are shuffled."""

    sequences: tuple[tuple[int, ...], ...]

    def inputs(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """All step inputs by placeholder name; every row's logits are asked for. The pool starts as NaN."""
        lengths = [len(s) for s in self.sequences]
        pages = [-(-n // TOKENS_PER_PAGE) for n in lengths]
        order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(5)).to(torch.int32)
        table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32)
        used = 0
        for row, count in zip(table, pages, strict=True):
            row[:count] = order[used : used + count]
            used += count
        pool = torch.full(
            (len(order), layers, 2, kv_heads, TOKENS_PER_PAGE, head_dim), torch.nan, dtype=dtype
        )
        return {
            "token_ids": torch.tensor([[t for s in self.sequences for t in s]]),
            "positions": torch.tensor([[p for n in lengths for p in range(n)]]),
            "row_ids": torch.arange(sum(lengths)),
            "kv_pool": pool,
            "page_table": table,
            "cu_q": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
            "kv_lens": torch.tensor(lengths, dtype=torch.int32),
        }


@dataclass
class Family:
    """A tiny model of one family: its checkpoint, and what became of its graph."""

    path: Path
    dtype: str
    packed: Packed
    trace: Callable[..., tuple[Graph, Any]]
    target: str = "cpu"
    trace_nodes: int = 0
    trace_ops: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(default_factory=dict)
    logits: dict[str, torch.Tensor] = field(default_factory=dict)
    ops: dict[str, Counter[str]] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    _references: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def source(self) -> ModelSource:
        return open_model(str(self.path))

    def traced(self) -> Graph:
        """The graph before all passes, the caller's own."""
        return self.trace(self.source, self.dtype)[0]

    @cached_property
    def graph(self) -> Graph:
        """The graph after all passes; fills in what was seen after each of them.

        The trace itself cannot run: it holds device checks for the meta device until canonicalize.
        """
        graph = self.traced()
        self.trace_nodes, self.trace_ops = len(graph.graph.nodes), ops(graph)
        expected = expected_matches(self.source.config, self.passes)
        self.counts = run_passes(graph, self.passes, expected, after_each=self._record)
        return graph

    @property
    def passes(self) -> tuple[Pass, ...]:
        return passes_for(BuildOptions(target=self.target))

    @cached_property
    def module(self) -> Module:
        return lower(self.graph)

    def reference(self, dtype: str) -> torch.Tensor:
        """HF's logits [T, vocab], every sequence alone, eager attention, weights by HF's loader."""
        if dtype not in self._references:
            model = self.hf(dtype)
            with torch.no_grad():
                rows = [model(torch.tensor([s])).logits[0].float() for s in self.packed.sequences]
            self._references[dtype] = torch.cat(rows)
        return self._references[dtype]

    def hf(self, dtype: str) -> nn.Module:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            self.path, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()

    def weights(self, graph: Graph) -> dict[str, torch.Tensor]:
        """Every weight of the graph, made by its recipe."""
        return read_weights(graph, lambda ref: run_recipe(ref, reader(self.source, graph)))

    def inputs(self) -> dict[str, torch.Tensor]:
        config = self.source.config
        return self.packed.inputs(
            config.num_hidden_layers,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            getattr(torch, self.dtype),
        )

    def _record(self, name: str, graph: Graph) -> None:
        self.logits[name] = run_graph(graph, self.weights(graph), self.inputs())[0].float()
        self.ops[name], self.nodes[name] = ops(graph), len(graph.graph.nodes)


@pytest.fixture(scope="session")
def family(
    models: ModuleType, traces: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Family]:
    """`family("llama", target="cpu", dtype="float32", lengths=(13, 7), **config)`: fused once a session."""
    made: dict[str, Family] = {}

    def get(
        model_type: str,
        *,
        target: str = "cpu",
        dtype: str = "float32",
        lengths: tuple[int, ...] = (13, 7),
        **config: Any,
    ) -> Family:
        key = repr((model_type, target, dtype, lengths, sorted(config.items())))
        if key not in made:
            path = models.make_tiny(model_type, tmp_path_factory.mktemp(model_type) / "model", **config)
            draw = np.random.default_rng(7)
            sequences = tuple(tuple(draw.integers(5, models.VOCAB_SIZE, n).tolist()) for n in lengths)
            made[key] = Family(path, dtype, Packed(sequences), traces, target)
        return made[key]

    return get


@pytest.fixture(scope="module")
def one_trace(shared_traces: None) -> Iterator[None]:
    """Builds and packs of a module open, trace and lower a model once: for tests of what comes after."""
    with pytest.MonkeyPatch.context() as patch:
        shared = cache(FrontEnd)
        for module in (build_module, build_pack_module):
            patch.setattr(module, "FrontEnd", shared)
        yield


@pytest.fixture
def small_graph() -> Callable[..., SmallGraph]:
    """`small_graph(module, x=..., rows=("row_ids",))`: see SmallGraph."""

    def make(module: nn.Module, *, rows: tuple[str, ...] = (), **inputs: torch.Tensor) -> SmallGraph:
        return SmallGraph(module, inputs, rows)

    return make


@pytest.fixture(scope="session")
def timing_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One timing cache for all builds of the session."""
    return tmp_path_factory.mktemp("timings") / "cache.json"


@pytest.fixture(scope="session")
def options(timing_cache: Path) -> Callable[..., BuildOptions]:
    """Build options with tiny limits, so that timing is short, and the session's timing cache."""

    def make(**changes: Any) -> BuildOptions:
        tiny = {"max_num_tokens": 16, "max_batch_size": 4, "max_seq_len": 64, "tokens_per_page": 4}
        return BuildOptions(**{**tiny, "timing_cache": timing_cache, **changes})

    return make
