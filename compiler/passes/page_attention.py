"""Turn attention over whole prompts into paged attention that also writes the KV cache.

The step's tensors become inputs of the graph: the page pool, page tables, row offsets and
cache lengths (see `StepState`).
"""

from __future__ import annotations

import torch

from tapeout.compiler.graph import Graph, dtype, shape

STEP_TENSORS = ("kv_pool", "page_table", "cu_q", "kv_lens")


def page_attention(graph: Graph) -> int:
    """Returns the number of attention ops replaced."""
    calls = graph.nodes(torch.ops.tapeout.attention.default)
    if not calls:
        return 0
    kv_heads, head_dim = (int(s) for s in shape(calls[0].args[1])[-2:])
    pool_shape = (2, graph.attention_layers, 2, kv_heads, 4, head_dim)
    pool = torch.empty(pool_shape, dtype=dtype(calls[0].args[1]), device="meta")
    step = [graph.add_input("kv_pool", pool)]
    for name, example_shape in (("page_table", (2, 3)), ("cu_q", (3,)), ("kv_lens", (2,))):
        step.append(graph.add_input(name, torch.empty(example_shape, dtype=torch.int32, device="meta")))
    for call in calls:
        q, k, v, _, sinks, *attrs = call.args
        paged = graph.call(call, torch.ops.tapeout.paged_attention.default, q, k, v, sinks, *step, *attrs)
        call.replace_all_uses_with(paged)
        graph.graph.erase_node(call)
    return len(calls)
