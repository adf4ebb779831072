"""The passes, in order. Each is one file in `passes/`; this list is the whole of it.

The driver, not a pass, tidies, counts, checks the count against the model's facts and dumps
the graph. A pass takes a graph, edits it and returns how many places it rewrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tapeout.compiler.graph import Graph
from tapeout.compiler.limits import target_kind
from tapeout.compiler.near_miss import near_misses
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.passes.canonicalize import canonicalize
from tapeout.compiler.passes.fold_scalars import fold_scalars
from tapeout.compiler.passes.fold_weights import fold_weights
from tapeout.compiler.passes.fuse_add_rms_norm import fuse_add_rms_norm
from tapeout.compiler.passes.fuse_gated_mlp import fuse_gated_mlp
from tapeout.compiler.passes.fuse_layer_norm import fuse_layer_norm
from tapeout.compiler.passes.fuse_linear_add import fuse_linear_add
from tapeout.compiler.passes.fuse_norm_linear import fuse_norm_linear
from tapeout.compiler.passes.fuse_rms_norm import fuse_rms_norm
from tapeout.compiler.passes.fuse_rope import fuse_rope
from tapeout.compiler.passes.fuse_rope_attention import fuse_rope_attention
from tapeout.compiler.passes.join_head_norms import join_head_norms
from tapeout.compiler.passes.merge_qkv import merge_qkv
from tapeout.compiler.passes.page_attention import page_attention
from tapeout.compiler.passes.quantize_linears import quantize_linears
from tapeout.compiler.passes.recognize_activations import recognize_activations
from tapeout.compiler.passes.recognize_attention import recognize_attention
from tapeout.compiler.passes.recognize_linears import recognize_linears
from tapeout.compiler.passes.recognize_routers import recognize_routers
from tapeout.compiler.passes.select_logit_rows import select_logit_rows
from tapeout.compiler.passes.select_rows_early import select_rows_early
from tapeout.model_defs.facts import expected_counts
from tapeout.plugins.errors import UnsupportedError

Pass = Callable[[Graph], int]

PASSES: tuple[Pass, ...] = (
    canonicalize,
    recognize_attention,
    fold_scalars,
    fuse_rms_norm,
    join_head_norms,
    fuse_layer_norm,
    recognize_activations,
    fold_weights,
    recognize_linears,
    recognize_routers,
    fuse_rope,
    fuse_add_rms_norm,
    merge_qkv,
    fuse_gated_mlp,
    page_attention,
    select_logit_rows,
    select_rows_early,
)

# A kernel has a price on a GPU even where its work is small: few and large ops. What add_rms_norm
# fuses on a CPU is wanted by the linears on both sides here, so it gets what they leave.
CUDA_PASSES: tuple[Pass, ...] = (
    canonicalize,
    recognize_attention,
    fold_scalars,
    fuse_rms_norm,
    join_head_norms,
    fuse_layer_norm,
    recognize_activations,
    fold_weights,
    recognize_linears,
    recognize_routers,
    fuse_rope,
    merge_qkv,
    fuse_gated_mlp,
    page_attention,
    select_logit_rows,
    fuse_rope_attention,
    select_rows_early,
    fuse_linear_add,
    fuse_norm_linear,
    fuse_add_rms_norm,
)

# Which of the model's facts (see model_defs/facts.py) says how often a pass must match.
_FACT_OF_PASS = {
    "fuse_rms_norm": "rms_norm",
    "fuse_rope": "rope",
    "merge_qkv": "qkv_merge",
    "fuse_gated_mlp": "gated_mlp",
    "page_attention": "attention",
    "fuse_rope_attention": "whole_rope",
    "select_rows_early": "final_norm",
    "fuse_linear_add": "added_linear",
    "fuse_norm_linear": "normed_linear",
}


def passes_for(options: BuildOptions) -> tuple[Pass, ...]:
    """The passes of a build: quantization comes last, over the merged linears."""
    if target_kind(options) == "cuda":
        return CUDA_PASSES
    return (*PASSES, quantize_linears) if options.quantize == "int8-dynamic" else PASSES


def expected_matches(config: Any, passes: tuple[Pass, ...] = PASSES) -> dict[str, int | None]:
    """Match counts by pass name, as far as the config tells them."""
    facts = expected_counts(config)
    known = {name: facts[fact] for name, fact in _FACT_OF_PASS.items()} | {select_logit_rows.__name__: 1}
    return {p.__name__: known[p.__name__] for p in passes if p.__name__ in known}


def run_passes(
    graph: Graph,
    passes: tuple[Pass, ...],
    expected: Mapping[str, int | None],
    *,
    dump: Path | None = None,
    after_each: Callable[[str, Graph], None] | None = None,
) -> dict[str, int]:
    """Run the passes; returns match counts by pass name.

    Args:
        expected: match count by pass name where the model's facts give one.
        dump: folder for the graph's text after every pass.
        after_each: called with the pass name and the graph (tests execute it there).

    Raises:
        UnsupportedError: a pass matched another number of places than the facts say; places that
            look like a match and were left are named with their module.
    """
    counts = {}
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        _dump(graph, dump / "00_trace.txt")
    for index, pass_ in enumerate(passes, start=1):
        name = pass_.__name__
        counts[name] = pass_(graph)
        if pass_ is not canonicalize:
            canonicalize(graph)
        graph.tidy()
        if dump is not None or after_each is not None or index == len(passes):
            graph.recompile()
        if dump is not None:
            _dump(graph, dump / f"{index:02}_{name}.txt")
        want = expected.get(name)
        if want is not None and counts[name] != want:
            raise _wrong_count(graph, name, counts[name], want)
        if after_each is not None:
            after_each(name, graph)
    return counts


def _wrong_count(graph: Graph, name: str, count: int, want: int) -> UnsupportedError:
    left = near_misses(graph, name) if count < want else []
    places = "".join(f"\n  {place}" for place in left)
    return UnsupportedError(
        f"pass {name} matched {count} places, expected {want} from the model's config"
        + (f"; not matched:{places}" if places else ""),
        hint=f"build with --dump DIR and compare what the graph looks like before {name}",
    )


def _dump(graph: Graph, path: Path) -> None:
    weights = "".join(
        f"# {name} = {ref.text()}: {ref.dtype}{list(ref.shape)}\n" for name, ref in graph.weights.items()
    )
    path.write_text(weights + graph.module.code)
