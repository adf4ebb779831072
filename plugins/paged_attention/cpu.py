"""CPU tactics of paged_attention."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.cpu import BoundCall, CpuTactic
from tapeout.plugins.paged_attention.reference import paged_attention


class AtenPagedAttention(CpuTactic):
    """The reference, one sequence after the other: slow, always works."""

    op = "paged_attention"
    name = "aten"

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (q, k, v), (out,) = call.inputs, call.outputs
        (sinks,) = (*call.weights, None)[:1]
        step, attrs = call.step, dict(call.attrs)

        def run() -> None:
            num_seqs = int(step.counts[1])
            cu_q, kv_lens = step.cu_q[: num_seqs + 1], step.kv_lens[:num_seqs]
            out.copy_(
                paged_attention(q, k, v, sinks, step.kv_pool, step.page_table, cu_q, kv_lens, **attrs)
            )

        return run


TACTICS: tuple[CpuTactic, ...] = (AtenPagedAttention(),)
