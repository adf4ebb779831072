"""CPU tactics of paged_attention."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import NativeTactic, as_rows, dtype_code
from tapeout.plugins.paged_attention import SCHEMA
from tapeout.plugins.paged_attention.gather_sdpa import GatherSdpa

_MAX_HEAD_DIM = 256  # MAX_DIM of paged_attention.c


class NativePagedAttention(NativeTactic):
    """C kernel that walks the pages; see paged_attention.c."""

    op = "paged_attention"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        head_dim = signature.inputs[0].shape[-1]
        if not isinstance(head_dim, int) or head_dim % 8 or head_dim > _MAX_HEAD_DIM:
            return f"head_dim {head_dim} is not a multiple of 8 up to {_MAX_HEAD_DIM}"
        sinks = signature.weights[1:] if signature.attrs["alibi"] else signature.weights
        if {t.dtype for t in sinks} - {signature.inputs[0].dtype}:
            return "sinks have another dtype than the queries"
        if signature.attrs["alibi"] and signature.weights[0].dtype != "float32":
            return "ALiBi slopes are not float32"
        return super().unsupported(signature, host)

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (q, k, v), (out,) = call.inputs, call.outputs
        slopes, sinks = SCHEMA.place_weights(call.weights, call.attrs)
        views = [
            as_rows(t, f"paged_attention {name}") for t, name in ((q, "q"), (k, "k"), (v, "v"), (out, "out"))
        ]
        strides = [(view.row_stride, view.group_stride) for view in views]
        step, attrs, pool = call.step, call.attrs, call.step.kv_pool
        return self.library(call).bind(
            "paged_attention", q, *strides[0], k, *strides[1], v, *strides[2], out, *strides[3],
            slopes, sinks, pool,
            step.page_table, step.page_table.stride(0), step.cu_q, step.kv_lens, step.counts,
            q.shape[1], k.shape[1], q.shape[2], pool.shape[1], int(attrs["layer"]), step.tokens_per_page,
            dtype_code(q), dtype_code(pool), int(attrs["window"]), float(attrs["scale"]),
            float(attrs["softcap"]),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("paged_attention"), GatherSdpa(), NativePagedAttention())
