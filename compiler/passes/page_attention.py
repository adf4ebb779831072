"""Turn attention over whole prompts into paged attention that also writes the KV cache.

The step's tensors become inputs of the graph: the page pool, page tables, row offsets and
cache lengths (see `StepState`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tapeout.compiler.graph import Graph, dtype, shape
from tapeout.plugins.errors import UnsupportedError

STEP_TENSORS = ("kv_pool", "page_table", "cu_q", "kv_lens")


def page_attention(graph: Graph) -> int:
    """Returns the number of attention ops replaced.

    Raises UnsupportedError when layers keep keys or values of different shapes: all share one pool.
    """
    calls = graph.nodes(torch.ops.tapeout.attention.default)
    if not calls:
        return 0
    kv_heads, head_dim = _cache_shape(calls)
    pool_shape = (2, graph.attention_layers, 2, kv_heads, 4, head_dim)
    pool = torch.empty(pool_shape, dtype=dtype(calls[0].args[1]))
    step = [graph.add_input("kv_pool", pool)]
    for name, example_shape in (("page_table", (2, 3)), ("cu_q", (3,)), ("kv_lens", (2,))):
        step.append(graph.add_input(name, torch.empty(example_shape, dtype=torch.int32)))
    for call in calls:
        q, k, v, _, slopes, sinks, *attrs = call.args
        operands = (q, k, v, slopes, sinks)
        paged = graph.call(call, torch.ops.tapeout.paged_attention.default, *operands, *step, *attrs)
        call.replace_all_uses_with(paged)
        graph.graph.erase_node(call)
    return len(calls)


def _cache_shape(calls: Sequence[fx.Node]) -> tuple[int, int]:
    """(kv heads, head dim) of keys and values, the same in every layer."""
    found: dict[str, list[int]] = {}
    for call in calls:
        _, k, v, _, _, _, layer, *_ = call.args
        text = f"keys {[int(s) for s in shape(k)[-2:]]}, values {[int(s) for s in shape(v)[-2:]]}"
        found.setdefault(text, []).append(layer)
    k, v = calls[0].args[1:3]
    if len(found) > 1 or shape(k)[-2:] != shape(v)[-2:]:
        lines = "".join(f"\n  {text} in layers {layers}" for text, layers in found.items())
        raise UnsupportedError(
            "the KV cache needs one shape (kv heads, head dim) for keys and values of all layers, "
            f"found:{lines}",
            hint="models whose layers differ in kv heads or head dim are not supported yet",
        )
    kv_heads, head_dim = (int(s) for s in shape(k)[-2:])
    return kv_heads, head_dim
