"""What CUDA tactics of paged_attention share: checks, arguments, the cache's write, the context kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.paged_attention import SCHEMA
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
)

_LOG2_E = math.log2(math.e)
_MAX_HEAD_DIM, _MAX_HEADS_BLOCK = 256, 64


@dataclass(frozen=True)
class ContextTile:
    """Tile of `context`: m rows of queries times heads, n tokens at a time."""

    m: int
    n: int
    warps: int
    stages: int

    @property
    def label(self) -> str:
        return f"{self.m}x{self.n}_w{self.warps}s{self.stages}"


class PagedAttention(TritonTactic):
    """What all tactics share: the checks, the arguments, the cache write, the context kernel."""

    op = "paged_attention"
    #: Whether keys and values are read from the step's rows too, not from the cache alone.
    reads_rows = False

    def __init__(self, tile: ContextTile) -> None:
        super().__init__()
        self._tile = tile

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        q, k = signature.inputs[:2]
        heads, kv_heads, dim, page = int(q.shape[1]), int(k.shape[1]), int(q.shape[2]), target.tokens_per_page
        if page & (page - 1):
            return f"tokens_per_page {page} is no power of two"
        if dim > _MAX_HEAD_DIM:
            return f"head_dim {dim} is above {_MAX_HEAD_DIM}"
        if heads % kv_heads or heads // kv_heads > 128:
            return f"{heads} query heads do not fit {kv_heads} kv heads, or more than 128 share one"
        if self.reads_rows and signature.attrs["alibi"]:
            return "adds no ALiBi to the scores"
        tile = self._context_tile(signature)
        element_bytes = 4 if q.dtype == "float32" else 2
        needed = (2 * tile.stages * tile.n + tile.m) * power_of_two(dim) * element_bytes
        if not self.decode_only and needed > target.shared_bytes_per_block:
            return (
                f"needs {needed} bytes of shared memory, SM {target.sm} has {target.shared_bytes_per_block}"
            )
        if target.kv_dtype not in ("", "float32", "bfloat16"):
            return f"no CUDA kernel for a cache of {target.kv_dtype}"
        return super().unsupported(signature, target)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        return self._write(signature, target), *self.attend(signature, rows, target)

    def attend(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        """The launches after the cache was written; queries are input 0."""
        raise NotImplementedError

    def _sizes(self, signature: OpSignature, target: CudaTarget) -> dict[str, Any]:
        q, k = signature.inputs[:2]
        dim = int(q.shape[2])
        return {
            "HEADS": int(q.shape[1]), "KV_HEADS": int(k.shape[1]), "DIM": dim,
            "DIM_BLOCK": max(16, power_of_two(dim)), "PAGE": target.tokens_per_page,
            "WINDOW": int(signature.attrs["window"]) > 0, "SOFTCAP": float(signature.attrs["softcap"]) > 0,
            "SINKS": _weights(signature)[1] is not None,
        }  # fmt: skip

    def _alibi(self, signature: OpSignature) -> dict[str, int | bool]:
        """Constants of the kernels that know of ALiBi; without it their slopes are no argument."""
        return {"ALIBI": True} if signature.attrs["alibi"] else {"ALIBI": False, "slopes": 0}

    def _arguments(self, signature: OpSignature, target: CudaTarget) -> dict[str, Argument]:
        """Every argument of every kernel by name."""
        q, k, v = signature.inputs
        out, attrs = signature.outputs[0], signature.attrs
        softcap, scale = float(attrs["softcap"]), float(attrs["scale"])
        slopes, sinks = (
            None if index is None else pointer(name, signature.weights[index].dtype, Arg("weight", index))
            for name, index in zip(("slopes", "sinks"), _weights(signature), strict=True)
        )
        arguments = [
            pointer("q", q.dtype, Arg("input", 0)),
            pointer("k", k.dtype, Arg("input", 1)),
            pointer("v", v.dtype, Arg("input", 2)),
            pointer("out", out.dtype, Arg("output", 0)),
            *([slopes] if slopes else []),
            sinks or pointer("sinks", q.dtype, Arg("input", 0)),  # absent: never read
            *(step(n) for n in ("counts", "positions", "cu_q", "kv_lens", "row_seqs", "page_table")),
            pointer("kv_pool", target.kv_dtype or k.dtype, Arg("step", name="kv_pool")),
            *strides("q", q, "input", 0), *strides("k", k, "input", 1), *strides("v", v, "input", 2),
            *strides("out", out, "output", 0),
            Argument("scale", "fp32", Arg("f32", value=scale / softcap if softcap > 0 else scale * _LOG2_E)),
            Argument("softcap", "fp32", Arg("f32", value=softcap * _LOG2_E)),
            Argument("window", "i32", Arg("i32", value=int(attrs["window"]))),
            *(Argument(n, "i32", Arg(n)) for n in ("layers", "max_pages")),
            Argument("layer", "i32", Arg("attr", name="layer")),
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
            pick(self._arguments(signature, target), names),
            {**{n: sizes[n] for n in ("KV_HEADS", "DIM", "PAGE")}, "BLOCK": block},
            (GridDim(1), GridDim(0, ceil_div(width, block))),
            warps,
        )

    def _context(self, signature: OpSignature, target: CudaTarget, skip_decode: bool) -> LaunchSpec:
        sizes = self._sizes(signature, target)
        tile = self._context_tile(signature)
        heads_block = heads_block_of(sizes, tile)
        constants = {
            **sizes, **self._alibi(signature), "HEADS_BLOCK": heads_block, "BLOCK_Q": tile.m // heads_block,
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "SKIP_DECODE": skip_decode,
        }  # fmt: skip
        names = (
            "q", "out", "slopes", "sinks", "counts", "cu_q", "kv_lens", "row_seqs", "page_table", "kv_pool",
            "q_row", "q_group", "out_row", "out_group", "scale", "softcap", "window", "layers", "layer",
            "max_pages",
        )  # fmt: skip
        return launch(
            "paged_attention.triton:context",
            pick(self._arguments(signature, target), names),
            constants,
            (GridDim(tile.m // heads_block), GridDim(0, sizes["HEADS"] // heads_block)),
            tile.warps,
            tile.stages,
            fp_fusion=False,
        )

    def _context_tile(self, signature: OpSignature) -> ContextTile:
        """The tactic's tile, cut down to what registers hold for wide heads, ALiBi and float32."""
        wide = int(signature.inputs[0].shape[2]) > 128
        if signature.inputs[0].dtype == "float32":
            return ContextTile(32, 32, 8 if wide else 4, 1)
        return ContextTile(64, 32, 4, 2) if wide or signature.attrs["alibi"] else self._tile


def heads_block_of(sizes: dict[str, Any], tile: ContextTile) -> int:
    """Query heads of a block: as many of a kv head's as the tile holds."""
    group = sizes["HEADS"] // sizes["KV_HEADS"]
    return max(h for h in range(1, min(group, _MAX_HEADS_BLOCK, tile.m) + 1) if group % h == 0)


def pick(arguments: dict[str, Argument], names: tuple[str, ...]) -> list[Argument]:
    """The arguments of a kernel in its order; slopes are one where there are some."""
    return [arguments[name] for name in names if name != "slopes" or name in arguments]


def _weights(signature: OpSignature) -> tuple[int | None, int | None]:
    """Indices of slopes and sinks among the weights that are there."""
    slopes, sinks = SCHEMA.place_weights(range(len(signature.weights)), signature.attrs)
    return slopes, sinks
