"""CUDA tactics of rope_attention: `prepare`, then the attention of a paged_attention tactic."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.paged_attention.cuda import TACTICS as ATTENTION
from tapeout.plugins.paged_attention.cuda_tactic import PagedAttention
from tapeout.plugins.rope_attention.cuda_decode import DecodeEarly, DecodeTurned
from tapeout.plugins.rope_attention.parts import attention_of, head_arguments, norm_constants, partly_turned
from tapeout.plugins.triton_aot.redirect import shift_weights, to_workspace
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    TritonTactic,
    ceil_div,
    launch,
    pointer,
    power_of_two,
    step,
    workspace,
)

_BLOCK = 512  # pairs a block turns
_PREPARE = (
    "q", "k", "v", "table", "q_norm", "k_norm", "queries", "keys", "counts", "positions", "row_seqs",
    "page_table", "kv_pool", "eps", "weight_offset", "q_row", "q_group", "k_row", "k_group", "v_row",
    "v_group", "table_row", "layers", "layer", "max_pages",
)  # fmt: skip


class RopeAttention(TritonTactic):
    """The workspace holds the attention's own, then the turned queries [T, heads, dim].

    For a tactic that reads the step's rows the turned keys [T, kv_heads, dim] follow.
    """

    op = "rope_attention"

    def __init__(self, attention: PagedAttention) -> None:
        super().__init__()
        self._attention = attention
        self.name = attention.name
        self.batch_invariant = attention.batch_invariant
        self.interpretable = attention.interpretable
        self.decode_only = attention.decode_only

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if reason := partly_turned(signature):
            return reason
        if reason := super().unsupported(signature, target):
            return reason
        return self._attention.unsupported(attention_of(signature), target)

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        return self._attention.expected_us(attention_of(signature), rows, target)

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        keys = _row_bytes(signature, 1) if self._attention.reads_rows else 0
        return self._queries_at(signature, rows, target) + rows * (_row_bytes(signature, 0) + keys)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        queries = self._queries_at(signature, rows, target)
        keys = queries + rows * _row_bytes(signature, 0) if self._attention.reads_rows else None
        norms = 2 if signature.attrs["qk_norm"] else 0
        attend = []
        for item in self._attention.attend(attention_of(signature), rows, target):
            item = to_workspace(item, "input", 0, queries, _strides(signature, 0))
            if keys is not None:
                item = to_workspace(item, "input", 1, keys, _strides(signature, 1))
            attend.append(shift_weights(item, norms))
        return _prepare(signature, queries, keys, target), *attend

    def _queries_at(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        return ceil_div(self._attention.workspace_bytes(attention_of(signature), rows, target), 256) * 256


def _strides(signature: OpSignature, index: int) -> tuple[int, int]:
    """Elements from row to row and from head to head of an input that lies in the workspace."""
    heads, dim = (int(d) for d in signature.inputs[index].shape[1:])
    return heads * dim, dim


def _row_bytes(signature: OpSignature, index: int) -> int:
    return _strides(signature, index)[0] * (4 if signature.inputs[index].dtype == "float32" else 2)


def _prepare(signature: OpSignature, queries: int, keys: int | None, target: CudaTarget) -> LaunchSpec:
    """queries, keys: where they go in the workspace; keys None: to the cache alone."""
    q, k = signature.inputs[:2]
    heads, kv_heads, dim = int(q.shape[1]), int(k.shape[1]), int(q.shape[2])
    half_block = power_of_two(dim // 2)
    heads_block = min(power_of_two(heads), max(1, _BLOCK // half_block))
    known = [
        workspace("queries", q.dtype, queries),
        workspace("keys", q.dtype, keys or 0),
        *(step(n) for n in ("counts", "positions", "row_seqs", "page_table")),
        pointer("kv_pool", target.kv_dtype or k.dtype, Arg("step", name="kv_pool")),
        Argument("layers", "i32", Arg("layers")),
        Argument("layer", "i32", Arg("attr", name="layer")),
        Argument("max_pages", "i32", Arg("max_pages")),
    ]
    by_name = {**head_arguments(signature), **{a.name: a for a in known}}
    arguments = [by_name[name] for name in _PREPARE]
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "PAGE": target.tokens_per_page,
        "HEADS_BLOCK": heads_block, "HALF_BLOCK": half_block,
        "KEEP_KEYS": keys is not None, "INTERLEAVED": bool(signature.attrs["interleaved"]),
        **norm_constants(signature),
    }  # fmt: skip
    blocks = ceil_div(heads, heads_block) + ceil_div(kv_heads, heads_block)
    warps = max(1, heads_block * half_block // 128)
    grid = (GridDim(1), GridDim(0, blocks))
    return launch("rope_attention.triton:prepare", arguments, constants, grid, warps, fp_fusion=False)


TACTICS: tuple[CudaTactic, ...] = (
    *(RopeAttention(attention) for attention in ATTENTION),
    DecodeTurned(64),
    DecodeTurned(64, stages=3),
    DecodeTurned(128),
    DecodeTurned(32, stages=3),
    DecodeTurned(64, warps=2, stages=3),
    DecodeEarly(64, warps=4, per_sm=1),
    DecodeEarly(64, warps=4, per_sm=4),
    DecodeEarly(128, warps=8, per_sm=1),
)
