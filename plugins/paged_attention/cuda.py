"""CUDA tactics of paged_attention: which kernels of triton.py run, with which tiles."""

from __future__ import annotations

import math
from typing import Any

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.triton_aot.elementwise_tactic import block_of
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

_LOG2_E = math.log2(math.e)
_MAX_HEAD_DIM, _MAX_HEADS_BLOCK, _MAX_SPLITS = 256, 64, 64


class _PagedAttention(TritonTactic):
    """What all tactics share: the checks, the arguments, the cache write."""

    op = "paged_attention"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        q, k = signature.inputs[:2]
        heads, kv_heads, dim, page = int(q.shape[1]), int(k.shape[1]), int(q.shape[2]), target.tokens_per_page
        if page & (page - 1):
            return f"tokens_per_page {page} is no power of two"
        if dim > _MAX_HEAD_DIM:
            return f"head_dim {dim} is above {_MAX_HEAD_DIM}"
        if heads % kv_heads or heads // kv_heads > 128:
            return f"{heads} query heads do not fit {kv_heads} kv heads, or more than 128 share one"
        if target.kv_dtype not in ("", "float32", "bfloat16"):
            return f"no CUDA kernel for a cache of {target.kv_dtype}"
        return super().unsupported(signature, target)

    def _sizes(self, signature: OpSignature, target: CudaTarget) -> dict[str, Any]:
        q, k = signature.inputs[:2]
        dim = int(q.shape[2])
        return {
            "HEADS": int(q.shape[1]), "KV_HEADS": int(k.shape[1]), "DIM": dim,
            "DIM_BLOCK": max(16, power_of_two(dim)), "PAGE": target.tokens_per_page,
            "WINDOW": int(signature.attrs["window"]) > 0, "SOFTCAP": float(signature.attrs["softcap"]) > 0,
            "SINKS": len(signature.weights) > 0,
        }  # fmt: skip

    def _arguments(self, signature: OpSignature, target: CudaTarget) -> dict[str, Argument]:
        """Every argument of every kernel by name."""
        q, k, v = signature.inputs
        out, attrs = signature.outputs[0], signature.attrs
        softcap, scale = float(attrs["softcap"]), float(attrs["scale"])
        sinks = pointer("sinks", signature.weights[0].dtype, Arg("weight", 0)) if signature.weights else None
        arguments = [
            *(pointer(n, t.dtype, Arg("input", i)) for i, (n, t) in enumerate(zip("qkv", (q, k, v), strict=True))),
            pointer("out", out.dtype, Arg("output", 0)),
            sinks or pointer("sinks", q.dtype, Arg("input", 0)),  # absent: never read
            *(step(n) for n in ("counts", "positions", "cu_q", "kv_lens", "row_seqs", "page_table")),
            pointer("kv_pool", target.kv_dtype or k.dtype, Arg("step", name="kv_pool")),
            *strides("q", q, "input", 0), *strides("k", k, "input", 1), *strides("v", v, "input", 2),
            *strides("out", out, "output", 0),
            Argument("scale", "fp32", Arg("f32", value=scale / softcap if softcap > 0 else scale * _LOG2_E)),
            Argument("softcap", "fp32", Arg("f32", value=softcap * _LOG2_E)),
            Argument("window", "i32", Arg("i32", value=int(attrs["window"]))),
            *(Argument(n, "i32", Arg(n)) for n in ("layers", "layer", "max_pages")),
        ]  # fmt: skip
        return {a.name: a for a in arguments}

    def _write(self, signature: OpSignature, target: CudaTarget) -> LaunchSpec:
        sizes = self._sizes(signature, target)
        width = sizes["KV_HEADS"] * sizes["DIM"]
        block, warps = block_of(width)
        names = (
            "k", "v", "counts", "positions", "row_seqs", "page_table", "kv_pool", "k_row", "k_group",
            "v_row", "v_group", "layers", "layer", "max_pages",
        )  # fmt: skip
        return launch(
            "paged_attention.triton:write_kv",
            _pick(self._arguments(signature, target), names),
            {**{n: sizes[n] for n in ("KV_HEADS", "DIM", "PAGE")}, "BLOCK": block},
            (GridDim(1), GridDim(0, ceil_div(width, block))),
            warps,
        )

    def _context(
        self, signature: OpSignature, target: CudaTarget, block_m: int, block_n: int, skip_decode: bool,
        warps: int, stages: int,
    ) -> LaunchSpec:  # fmt: skip
        sizes = self._sizes(signature, target)
        group = sizes["HEADS"] // sizes["KV_HEADS"]
        heads_block = max(h for h in range(1, min(group, _MAX_HEADS_BLOCK, block_m) + 1) if group % h == 0)
        constants = {
            **sizes, "HEADS_BLOCK": heads_block, "BLOCK_Q": block_m // heads_block, "BLOCK_M": block_m,
            "BLOCK_N": block_n, "SKIP_DECODE": skip_decode,
        }  # fmt: skip
        names = (
            "q", "out", "sinks", "counts", "cu_q", "kv_lens", "row_seqs", "page_table", "kv_pool", "q_row",
            "q_group", "out_row", "out_group", "scale", "softcap", "window", "layers", "layer", "max_pages",
        )  # fmt: skip
        return launch(
            "paged_attention.triton:context",
            _pick(self._arguments(signature, target), names),
            constants,
            (GridDim(block_m // heads_block), GridDim(0, sizes["HEADS"] // heads_block)),
            warps,
            stages,
        )

    def _context_tiles(self, signature: OpSignature) -> dict[str, int]:
        """Tile of `context` by head_dim and dtype: what fits registers and shared memory."""
        wide = int(signature.inputs[0].shape[2]) > 128
        if signature.inputs[0].dtype == "float32":
            return {"block_m": 32, "block_n": 32, "warps": 4 if not wide else 8, "stages": 1}
        return {"block_m": 64 if wide else 128, "block_n": 32 if wide else 64, "warps": 4 if wide else 8, "stages": 2}


class Tiled(_PagedAttention):
    """Every row through `context`: its result depends on nothing but its sequence."""

    name = "triton_tiled"

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        tiles = self._context_tiles(signature)
        return (
            self._write(signature, target),
            self._context(signature, target, skip_decode=False, **tiles),
        )


class Split(_PagedAttention):
    """Sequences of one row split over blocks along their cache, all others through `context`.

    The number of splits follows the bucket, so that few rows still fill the device.
    """

    batch_invariant = False

    def __init__(self, decode_only: bool, block_n: int = 64, warps: int = 4, stages: int = 3) -> None:
        super().__init__()
        self.decode_only = decode_only
        self._block_n, self._warps, self._stages = block_n, warps, stages
        self.name = f"triton_{'decode' if decode_only else 'split'}_{block_n}_w{warps}s{stages}"

    def _splits(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        """A power of two that gives each multiprocessor about four blocks."""
        blocks = rows * int(signature.inputs[1].shape[1])
        return min(_MAX_SPLITS, power_of_two(max(1, 4 * target.sm_count // blocks)))

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        splits = self._splits(signature, rows, target)
        if splits == 1:
            return 0
        heads, dim = (int(d) for d in signature.inputs[0].shape[1:])
        return 4 * rows * heads * splits * (dim + 2)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        splits = self._splits(signature, rows, target)
        launches = [self._write(signature, target), self._decode(signature, rows, splits, target)]
        if splits > 1:
            launches.append(self._combine(signature, rows, splits, target))
        if not self.decode_only:
            tiles = self._context_tiles(signature)
            launches.append(self._context(signature, target, skip_decode=True, **tiles))
        return tuple(launches)

    def _with_partials(
        self, signature: OpSignature, rows: int, splits: int, target: CudaTarget
    ) -> dict[str, Argument]:
        heads, dim = (int(d) for d in signature.inputs[0].shape[1:])
        arguments = self._arguments(signature, target)
        if splits > 1:
            partials = [workspace("partial"), workspace("partial_ml", offset_bytes=4 * rows * heads * splits * dim)]
        else:  # never touched
            partials = [Argument(n, "*fp32", Arg("output", 0)) for n in ("partial", "partial_ml")]
        return {**arguments, **{a.name: a for a in partials}}

    def _decode(self, signature: OpSignature, rows: int, splits: int, target: CudaTarget) -> LaunchSpec:
        sizes = self._sizes(signature, target)
        group = sizes["HEADS"] // sizes["KV_HEADS"]
        block_n = self._block_n if signature.inputs[0].dtype == "bfloat16" else self._block_n // 2
        constants = {**sizes, "GROUP_BLOCK": max(16, power_of_two(group)), "BLOCK_N": block_n, "SPLITS": splits}
        names = (
            "q", "out", "sinks", "partial", "partial_ml", "counts", "cu_q", "kv_lens", "row_seqs", "page_table",
            "kv_pool", "q_row", "q_group", "out_row", "out_group", "scale", "softcap", "window", "layers",
            "layer", "max_pages",
        )  # fmt: skip
        return launch(
            "paged_attention.triton:decode",
            _pick(self._with_partials(signature, rows, splits, target), names),
            constants,
            (GridDim(1), GridDim(0, sizes["KV_HEADS"]), GridDim(0, splits)),
            self._warps,
            self._stages if signature.inputs[0].dtype == "bfloat16" else 2,
        )

    def _combine(self, signature: OpSignature, rows: int, splits: int, target: CudaTarget) -> LaunchSpec:
        sizes = self._sizes(signature, target)
        block_n = self._block_n if signature.inputs[0].dtype == "bfloat16" else self._block_n // 2
        constants = {
            **{n: sizes[n] for n in ("HEADS", "DIM", "DIM_BLOCK", "WINDOW", "SINKS")},
            "BLOCK_N": block_n, "SPLITS": splits,
        }  # fmt: skip
        names = (
            "out", "sinks", "partial", "partial_ml", "counts", "cu_q", "kv_lens", "row_seqs", "out_row",
            "out_group", "window",
        )  # fmt: skip
        return launch(
            "paged_attention.triton:combine",
            _pick(self._with_partials(signature, rows, splits, target), names),
            constants,
            (GridDim(1), GridDim(0, sizes["HEADS"])),
        )


def _pick(arguments: dict[str, Argument], names: tuple[str, ...]) -> list[Argument]:
    return [arguments[name] for name in names]


TACTICS: tuple[CudaTactic, ...] = (
    Tiled(),
    Split(decode_only=False),
    Split(decode_only=True),
    Split(decode_only=True, block_n=128, warps=4, stages=2),
)
