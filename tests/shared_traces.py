"""Traces of equal models, made once a session: a tiny model's takes seconds, and most tests are about what
is done with the graph.

Tests of tracing itself, and of builds that must repeat byte for byte, trace anew: sharing is asked for, by
the fixture `shared_traces`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tapeout.compiler import front_end

Traced = tuple[Any, Callable[[str], Any]]


class SharedTraces:
    """`trace_source` that remembers, by all that a trace depends on: config, names, types and shapes of
    tensors, recipes, precision, length. What fails is told anew each time."""

    def __init__(self) -> None:
        self._trace = front_end.trace_source
        self._made: dict[str, Traced] = {}

    def __call__(self, source: Any, dtype: str, max_seq_len: int | None = None) -> Traced:
        if source.trust_remote_code:
            return self._trace(source, dtype, max_seq_len)
        config = {key: value for key, value in source.config.to_dict().items() if key != "_name_or_path"}
        tensors, recipes = sorted(source.checkpoint.tensors.items()), sorted(source.recipes.items())
        kind = type(source.config).__name__
        key = repr((kind, config, source.raw_config, tensors, recipes, dtype, max_seq_len))
        if key not in self._made:
            self._made[key] = self._trace(source, dtype, max_seq_len)
        graph, find_weight = self._made[key]
        return graph.copy(), find_weight
