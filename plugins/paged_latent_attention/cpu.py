"""CPU tactics of paged_latent_attention."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, OpSignature
from tapeout.plugins.native.tactic import NativeTactic, as_rows, dtype_code


class NativePagedLatentAttention(NativeTactic):
    """C kernel that walks the pages; see paged_latent_attention.c."""

    op = "paged_latent_attention"

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        if {w.dtype for w in signature.weights} != {signature.inputs[0].dtype}:
            return "weights have another dtype than the queries"
        return super().unsupported(signature, host)

    def bind(self, call: BoundCall) -> Callable[[], None]:
        (nope, rot, latent, k_rot), (up_key, up_value), (out,) = call.inputs, call.weights, call.outputs
        heads = [as_rows(t, "paged_latent_attention heads") for t in (nope, rot, out)]
        rows = [as_rows(t, "paged_latent_attention rows") for t in (latent, k_rot)]
        step, pool = call.step, call.step.kv_pool
        return self.library(call).bind(
            "paged_latent_attention", nope, heads[0].row_stride, heads[0].group_stride,
            rot, heads[1].row_stride, heads[1].group_stride, latent, rows[0].row_stride,
            k_rot, rows[1].row_stride, up_key, up_value, out, heads[2].row_stride, heads[2].group_stride,
            pool, step.page_table, step.page_table.stride(0), step.cu_q, step.kv_lens, step.counts,
            nope.shape[1], nope.shape[2], rot.shape[2], latent.shape[1], out.shape[2], pool.shape[1],
            int(call.attrs["layer"]), step.tokens_per_page, dtype_code(nope), dtype_code(pool),
            int(call.attrs["window"]), float(call.attrs["scale"]),
        )  # fmt: skip


TACTICS: tuple[CpuTactic, ...] = (AtenTactic("paged_latent_attention"), NativePagedLatentAttention())
