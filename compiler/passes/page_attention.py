"""Turn attention over whole prompts into paged attention that also writes the KV cache.

The step's tensors become inputs of the graph: the page pool, page tables, row offsets and
cache lengths (see `StepState`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tapeout.compiler.graph import Graph, custom_name, dtype, shape
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.registry import OPS

STEP_TENSORS = ("kv_pool", "page_table", "cu_q", "kv_lens")


_LONG = {"k": "keys", "v": "values"}
_PAGED = {
    torch.ops.tapeout.attention.default: torch.ops.tapeout.paged_attention.default,
    torch.ops.tapeout.latent_attention.default: torch.ops.tapeout.paged_latent_attention.default,
}


def page_attention(graph: Graph) -> int:
    """Returns the number of attention ops replaced.

    Raises UnsupportedError when layers keep keys or values of different shapes: all share one pool.
    """
    calls = sorted(n for target in _PAGED for n in graph.nodes(target))
    if not calls:
        return 0
    kv_heads, head_dim = _cache_shape(calls)
    pool_shape = (2, graph.attention_layers, 2, kv_heads, 4, head_dim)
    pool = torch.empty(pool_shape, dtype=dtype(calls[0].args[1]))
    step = [graph.add_input("kv_pool", pool)]
    for name, example_shape in (("page_table", (2, 3)), ("cu_q", (3,)), ("kv_lens", (2,))):
        step.append(graph.add_input(name, torch.empty(example_shape, dtype=torch.int32)))
    for call in calls:
        schema = OPS[str(custom_name(call))]
        inputs, rest = call.args[: len(schema.inputs) - 1], call.args[len(schema.inputs) :]
        weights, attrs = rest[: len(schema.weights)], rest[len(schema.weights) :]
        paged = graph.call(call, _PAGED[call.target], *inputs, *weights, *step, *attrs)
        call.replace_all_uses_with(paged)
        graph.graph.erase_node(call)
    return len(calls)


def _cache_shape(calls: Sequence[fx.Node]) -> tuple[int, int]:
    """(kv heads, head dim) of keys and values, the same in every layer."""
    found: dict[str, list[int]] = {}
    shapes = set()
    for call in calls:
        paged = OPS[f"paged_{custom_name(call)}"]
        inputs = [shape(n) for n in call.args[: len(paged.inputs)]]
        cached = paged.cache_shape(inputs)
        shapes.add(cached)
        if not paged.latents and inputs[1][-2:] != inputs[2][-2:]:
            shapes.add(paged.cache_shape([inputs[0], inputs[2]]))
        names = [paged.inputs[i] for i in paged.latents or (1, 2)]
        parts = [[int(s) for s in inputs[i][-2 + bool(paged.latents) :]] for i in paged.latents or (1, 2)]
        text = ", ".join(f"{_LONG.get(n, n)} {part}" for n, part in zip(names, parts, strict=True))
        found.setdefault(text, []).append(int(call.args[_layer_at(call)]))
    if len(shapes) > 1:
        lines = "".join(f"\n  {text} in layers {layers}" for text, layers in found.items())
        raise UnsupportedError(
            "the KV cache needs one shape (kv heads, head dim) for keys and values of all layers, "
            f"found:{lines}",
            hint="models whose layers differ in kv heads or head dim are not supported yet",
        )
    return shapes.pop()


def _layer_at(call: fx.Node) -> int:
    """Where the attribute `layer` stands among a call's arguments."""
    schema = OPS[str(custom_name(call))]
    return len(schema.inputs) + len(schema.weights) + list(schema.attrs).index("layer")
