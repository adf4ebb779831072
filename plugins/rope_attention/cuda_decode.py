"""CUDA tactics of rope_attention that run a decode-only step in one launch."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import MAX_KV_HEADS, Arg, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.paged_attention.cuda import Split
from tapeout.plugins.rope_attention.parts import attention_of, head_arguments, norm_constants, partly_turned
from tapeout.plugins.triton_aot.tactic import TritonTactic, launch, pointer, power_of_two, step


class DecodeTurned(TritonTactic):
    """`decode_turned`: splits and sizes are those of a `Split` without a context tile; tiles of the cache
    pass through shared memory."""

    op = "rope_attention"
    batch_invariant = False
    decode_only = True
    _kernel = "rope_attention.triton_decode:decode_turned"

    def __init__(self, block_n: int, warps: int = 4, stages: int = 2, per_sm: int = 4) -> None:
        super().__init__()
        self._attention = Split(None, block_n, warps, stages, per_sm=per_sm)
        self._block_n, self._warps, self._stages = block_n, warps, stages
        self.name = f"triton_decode_turned_{block_n}_w{warps}s{stages}"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        dim, kv_heads = (int(signature.inputs[1].shape[i]) for i in (2, 1))
        if reason := partly_turned(signature):
            return reason
        if signature.attrs["interleaved"]:
            return "pairs stand side by side, not in halves of a head"
        if dim not in {64, 128, 256}:
            return f"heads of {dim} elements, expected 64, 128 or 256"
        if signature.inputs[0].dtype != "bfloat16":
            return "float32 products run on the ordinary units"
        if kv_heads > MAX_KV_HEADS:
            return f"{kv_heads} kv heads are above {MAX_KV_HEADS}"
        if reason := super().unsupported(signature, target):
            return reason
        return self._attention.unsupported(attention_of(signature), target)

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        return 0.8

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        return self._attention.workspace_bytes(attention_of(signature), rows, target)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        attention = attention_of(signature)
        q, k = signature.inputs[:2]
        heads, kv_heads, dim = int(q.shape[1]), int(k.shape[1]), int(q.shape[2])
        splits = self._attention.splits(attention, rows, target)
        sinks = Arg("weight", len(signature.weights) - 1) if attention.weights else Arg("input", 0)
        arguments = {
            **self._attention.with_partials(attention, rows, splits, target),
            **head_arguments(signature),
            "sinks": pointer("sinks", q.dtype, sinks),
            "arrivals": step("arrivals"),
        }
        names = (
            "q", "k", "v", "table", "q_norm", "k_norm", "out", "sinks", "partial", "partial_ml", "arrivals",
            "counts", "cu_q", "kv_lens", "row_seqs", "page_table", "kv_pool", "eps", "weight_offset",
            "q_row", "q_group", "k_row", "k_group", "v_row", "v_group", "table_row", "out_row", "out_group",
            "scale", "softcap", "window", "layers", "layer", "max_pages",
        )  # fmt: skip
        attrs = signature.attrs
        constants = {
            "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "PAGE": target.tokens_per_page,
            "GROUP_BLOCK": max(16, power_of_two(heads // kv_heads)),
            "GROUP_ROWS": power_of_two(heads // kv_heads), "BLOCK_N": self._block_n, "SPLITS": splits,
            "MAX_KV_HEADS": MAX_KV_HEADS, "WINDOW": int(attrs["window"]) > 0,
            "SOFTCAP": float(attrs["softcap"]) > 0, "SINKS": bool(attention.weights),
            **norm_constants(signature),
        }  # fmt: skip
        grid = (GridDim(1), GridDim(0, kv_heads), GridDim(0, splits))
        return (
            launch(
                self._kernel, [arguments[n] for n in names], constants, grid,
                self._warps, self._stages, fp_fusion=False,
            ),
        )  # fmt: skip


class DecodeEarly(DecodeTurned):
    """`decode_early`, for few rows: with more, hiding a load's latency by other blocks' work is faster.

    per_sm: blocks a multiprocessor gets.
    """

    max_rows = 4
    _kernel = "rope_attention.triton_early:decode_early"

    def __init__(self, block_n: int, warps: int, per_sm: int) -> None:
        super().__init__(block_n, warps, stages=1, per_sm=per_sm)
        self.name = f"triton_decode_early_{block_n}_w{warps}_x{per_sm}"
