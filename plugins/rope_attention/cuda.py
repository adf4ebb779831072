"""CUDA tactics of rope_attention: `prepare`, then the attention of a paged_attention tactic."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.paged_attention.cuda import TACTICS as ATTENTION
from tapeout.plugins.paged_attention.cuda import PagedAttention
from tapeout.plugins.triton_aot.redirect import shift_weights, to_workspace
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    TritonTactic,
    ceil_div,
    launch,
    pointer,
    power_of_two,
    step,
    strides,
    workspace,
)

_ATTENTION_ATTRS = ("layer", "scale", "window", "softcap")
_BLOCK = 512  # pairs a block turns


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
        self.decode_only = attention.decode_only

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        q, table = signature.inputs[0], signature.inputs[3]
        if int(q.shape[2]) != int(table.shape[1]):
            return f"turns {table.shape[1]} of {q.shape[2]} elements of a head, expected all"
        if reason := super().unsupported(signature, target):
            return reason
        return self._attention.unsupported(_attention(signature), target)

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        return self._attention.expected_us(_attention(signature), rows, target)

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        keys = _row_bytes(signature, 1) if self._attention.reads_rows else 0
        return self._queries_at(signature, rows, target) + rows * (_row_bytes(signature, 0) + keys)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        queries = self._queries_at(signature, rows, target)
        keys = queries + rows * _row_bytes(signature, 0) if self._attention.reads_rows else None
        norms = 2 if signature.attrs["qk_norm"] else 0
        attend = []
        for item in self._attention.attend(_attention(signature), rows, target):
            item = to_workspace(item, "input", 0, queries, _strides(signature, 0))
            if keys is not None:
                item = to_workspace(item, "input", 1, keys, _strides(signature, 1))
            attend.append(shift_weights(item, norms))
        return _prepare(signature, queries, keys, target), *attend

    def _queries_at(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        return ceil_div(self._attention.workspace_bytes(_attention(signature), rows, target), 256) * 256


def _strides(signature: OpSignature, index: int) -> tuple[int, int]:
    """Elements from row to row and from head to head of an input that lies in the workspace."""
    heads, dim = (int(d) for d in signature.inputs[index].shape[1:])
    return heads * dim, dim


def _row_bytes(signature: OpSignature, index: int) -> int:
    return _strides(signature, index)[0] * (4 if signature.inputs[index].dtype == "float32" else 2)


def _attention(signature: OpSignature) -> OpSignature:
    """The attention inside."""
    weights = signature.weights[2:] if signature.attrs["qk_norm"] else signature.weights
    attrs = {n: signature.attrs[n] for n in _ATTENTION_ATTRS if n in signature.attrs}
    return OpSignature("paged_attention", signature.inputs[:3], weights, signature.outputs, attrs)


def _prepare(signature: OpSignature, queries: int, keys: int | None, target: CudaTarget) -> LaunchSpec:
    """queries, keys: where they go in the workspace; keys None: to the cache alone."""
    q, k, v, table = signature.inputs
    heads, kv_heads, dim = int(q.shape[1]), int(k.shape[1]), int(q.shape[2])
    qk_norm = bool(signature.attrs["qk_norm"])
    half_block = power_of_two(dim // 2)
    heads_block = min(power_of_two(heads), max(1, _BLOCK // half_block))
    gains = [(n, Arg("weight", i)) if qk_norm else (n, Arg("input", i)) for i, n in enumerate(("q", "k"))]
    gain_dtype = signature.weights[0].dtype if qk_norm else q.dtype
    arguments = [
        *(pointer("qkv"[i], signature.inputs[i].dtype, Arg("input", i)) for i in range(3)),
        pointer("table", table.dtype, Arg("input", 3)),
        *(pointer(f"{n}_norm", gain_dtype, source) for n, source in gains),
        workspace("queries", q.dtype, queries),
        workspace("keys", q.dtype, keys or 0),
        *(step(n) for n in ("counts", "positions", "row_seqs", "page_table")),
        pointer("kv_pool", target.kv_dtype or k.dtype, Arg("step", name="kv_pool")),
        Argument("eps", "fp32", Arg("f32", value=float(signature.attrs["eps"]))),
        Argument("weight_offset", "fp32", Arg("f32", value=float(signature.attrs["weight_offset"]))),
        *strides("q", q, "input", 0), *strides("k", k, "input", 1), *strides("v", v, "input", 2),
        Argument("table_row", "i32", Arg("input_stride", 3, value=0)),
        Argument("layers", "i32", Arg("layers")),
        Argument("layer", "i32", Arg("attr", name="layer")),
        Argument("max_pages", "i32", Arg("max_pages")),
    ]  # fmt: skip
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "PAGE": target.tokens_per_page,
        "HEADS_BLOCK": heads_block, "HALF_BLOCK": half_block,
        "KEEP_KEYS": keys is not None, "QK_NORM": qk_norm,
        "INTERLEAVED": bool(signature.attrs["interleaved"]),
        "CAST_FIRST": bool(signature.attrs["cast_before_weight"]),
        "HAS_OFFSET": float(signature.attrs["weight_offset"]) != 0,
    }  # fmt: skip
    blocks = ceil_div(heads, heads_block) + ceil_div(kv_heads, heads_block)
    warps = max(1, heads_block * half_block // 128)
    grid = (GridDim(1), GridDim(0, blocks))
    return launch("rope_attention.triton:prepare", arguments, constants, grid, warps, fp_fusion=False)


TACTICS: tuple[CudaTactic, ...] = tuple(RopeAttention(attention) for attention in ATTENTION)
