"""CUDA tactics of paged_attention: which kernels of triton.py run, with which tiles."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.paged_attention.cuda_tactic import ContextTile, PagedAttention, heads_block_of, pick
from tapeout.plugins.triton_aot.tactic import Argument, launch, power_of_two, workspace

_MAX_SPLITS = 64
_FEW_DECODES = 32  # beside context


class Tiled(PagedAttention):
    """Every row through `context`: its result depends on nothing but its sequence."""

    def __init__(self, tile: ContextTile) -> None:
        super().__init__(tile)
        self.name = f"triton_tiled_{tile.label}"

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        return 2.0  # only where batch invariance asks for it

    def attend(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        return (self._context(signature, target, skip_decode=False),)


class Split(PagedAttention):
    """Sequences of one row split over blocks along their cache, all others through `context`.

    Without a context tile it is for decode-only buckets. The number of splits follows the
    bucket, so that few rows still fill the device.
    """

    batch_invariant = False

    def __init__(
        self,
        tile: ContextTile | None,
        block_n: int = 64,
        warps: int = 4,
        stages: int = 3,
        *,
        packed: bool = False,
        per_sm: int = 4,
    ) -> None:
        super().__init__(tile or _SAFE_TILE)
        self.decode_only, self.reads_rows = tile is None, packed
        self._block_n, self._warps, self._stages = block_n, warps, stages
        self._per_sm = per_sm if self.decode_only else 2 * per_sm  # beside context few have work
        decode, context = f"{block_n}_w{warps}s{stages}", "packed" if packed else "context"
        self.name = f"triton_split_{decode}_{context}_{tile.label}" if tile else f"triton_decode_{decode}"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if self.reads_rows:
            dim = int(signature.inputs[0].shape[2])
            if target.sm < 90:
                return f"SM {target.sm} has no bulk tensor copy engine"
            if signature.inputs[0].dtype != "bfloat16" or dim not in {64, 128}:
                return f"not meant for {signature.inputs[0].dtype} heads of {dim} elements"
        return super().unsupported(signature, target)

    def _slots(self, rows: int) -> int:
        """Sequences that are split over their cache: all, or few where most rows are no decode's."""
        return rows if self.decode_only else min(rows, _FEW_DECODES)

    def splits(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        """A power of two that gives each multiprocessor about so many blocks."""
        blocks = self._slots(rows) * int(signature.inputs[1].shape[1])
        return min(_MAX_SPLITS, power_of_two(max(1, self._per_sm * target.sm_count // blocks)))

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        return 0.9 if self.decode_only else 1.0

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        splits = self.splits(signature, rows, target)
        if splits == 1:
            return 0
        heads, dim = (int(d) for d in signature.inputs[0].shape[1:])
        return 4 * self._slots(rows) * heads * splits * (dim + 2)

    def attend(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        splits = self.splits(signature, rows, target)
        launches = [self._decode(signature, rows, splits, target)]
        if splits > 1:
            launches.append(self._combine(signature, rows, splits, target))
        if self.reads_rows:
            launches.append(self._packed_context(signature, target))
        elif not self.decode_only:
            launches.append(self._context(signature, target, skip_decode=True))
        return tuple(launches)

    def _packed_context(self, signature: OpSignature, target: CudaTarget) -> LaunchSpec:
        sizes, tile = self._sizes(signature, target), self._tile
        heads_block = heads_block_of(sizes, tile)
        constants = {
            **{n: value for n, value in sizes.items() if n != "DIM_BLOCK"}, "HEADS_BLOCK": heads_block,
            "BLOCK_Q": tile.m // heads_block, "BLOCK_M": tile.m, "BLOCK_N": tile.n,
        }  # fmt: skip
        names = (
            "q", "k", "v", "out", "sinks", "counts", "cu_q", "kv_lens", "row_seqs", "page_table", "kv_pool",
            "q_row", "q_group", "k_row", "k_group", "v_row", "v_group", "out_row", "out_group", "scale",
            "softcap", "window", "layers", "layer", "max_pages",
        )  # fmt: skip
        return launch(
            "paged_attention.triton_packed:packed_context",
            pick(self._arguments(signature, target), names),
            constants,
            (GridDim(0, sizes["HEADS"] // heads_block), GridDim(tile.m // heads_block)),
            tile.warps,
            tile.stages,
        )

    def with_partials(
        self, signature: OpSignature, rows: int, splits: int, target: CudaTarget
    ) -> dict[str, Argument]:
        heads, dim = (int(d) for d in signature.inputs[0].shape[1:])
        arguments = self._arguments(signature, target)
        if splits > 1:
            partials = [
                workspace("partial"),
                workspace("partial_ml", offset_bytes=4 * self._slots(rows) * heads * splits * dim),
            ]
        else:  # never touched
            partials = [Argument(n, "*fp32", Arg("output", 0)) for n in ("partial", "partial_ml")]
        return {**arguments, **{a.name: a for a in partials}}

    def _decode(self, signature: OpSignature, rows: int, splits: int, target: CudaTarget) -> LaunchSpec:
        sizes = self._sizes(signature, target)
        group = sizes["HEADS"] // sizes["KV_HEADS"]
        block_n = self._block_n if signature.inputs[0].dtype == "bfloat16" else self._block_n // 2
        constants = {
            **sizes,
            **self._alibi(signature),
            "GROUP_BLOCK": max(16, power_of_two(group)),
            "BLOCK_N": block_n,
            "SPLITS": splits,
        }
        names = (
            "q", "out", "slopes", "sinks", "partial", "partial_ml", "counts", "cu_q", "kv_lens", "row_seqs",
            "page_table", "kv_pool", "q_row", "q_group", "out_row", "out_group", "scale", "softcap", "window",
            "layers", "layer", "max_pages",
        )  # fmt: skip
        kernel, taken, leading = self._by_row_or_sequence("decode", names, rows)
        return launch(
            kernel,
            pick(self.with_partials(signature, rows, splits, target), taken),
            constants,
            (leading, GridDim(0, sizes["KV_HEADS"]), GridDim(0, splits)),
            self._warps,
            self._stages if signature.inputs[0].dtype == "bfloat16" else 2,
        )

    def _by_row_or_sequence(
        self, kernel: str, names: tuple[str, ...], rows: int
    ) -> tuple[str, tuple[str, ...], GridDim]:
        """Kernel, its arguments and the first dimension of its grid."""
        if self.decode_only:
            return f"paged_attention.triton:{kernel}", names, GridDim(1)
        names = tuple(n for n in names if n != "row_seqs")
        return f"paged_attention.triton:{kernel}_sequences", names, GridDim(0, self._slots(rows))

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
        kernel, taken, leading = self._by_row_or_sequence("combine", names, rows)
        return launch(
            kernel,
            pick(self.with_partials(signature, rows, splits, target), taken),
            constants,
            (leading, GridDim(0, sizes["HEADS"])),
        )


class Specialized(Split):
    """`Split` whose context kernel gives its warpgroups different work (Hopper alone; see gluon_context.py).

    A program a multiprocessor walks over tiles of 128 rows and takes block_n keys at a time; `ring` is how
    many tiles of keys and of values shared memory holds.
    """

    interpretable = False
    _ROWS = 128
    #: Per thread; two consumer warpgroups and the producer fill a multiprocessor's register file.
    _CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24

    def __init__(self, block_n: int, ring: int) -> None:
        super().__init__(ContextTile(self._ROWS, block_n, 4, 1), packed=True)
        self._ring = ring
        self.name = f"triton_split_64_w4s3_persistent_{self._ROWS}x{block_n}_r{ring}"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        if target.sm != 90:
            return f"made for SM 90, not {target.sm}"
        if target.kv_dtype not in ("", "bfloat16"):
            return f"copies the cache as it is, which is {target.kv_dtype}"
        if target.tokens_per_page < 16:
            return f"tokens_per_page {target.tokens_per_page} is below 16"
        sizes = self._sizes(signature, target)
        if special := [name.lower() for name in ("WINDOW", "SOFTCAP", "SINKS") if sizes[name]]:
            return f"has no {', '.join(special)}"
        rows = self._ROWS * 3 // 2 + self._ring * self._tile.n  # queries, half of the results, ring
        if (needed := rows * sizes["DIM"] * 2 + 1024) > target.shared_bytes_per_block:
            return f"needs {needed} bytes of shared memory"
        return super().unsupported(signature, target)

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        return 0.95  # measured: ahead of every other context kernel from 512 rows on

    def _packed_context(self, signature: OpSignature, target: CudaTarget) -> LaunchSpec:
        sizes = self._sizes(signature, target)
        group = sizes["HEADS"] // sizes["KV_HEADS"]
        constants = {
            **{n: sizes[n] for n in ("HEADS", "KV_HEADS", "DIM", "PAGE")},
            "HEADS_BLOCK": min(64, group & -group),  # the largest power of two that divides the group
            "BLOCK_N": self._tile.n, "RING": self._ring, "CONSUMER_REGISTERS": self._CONSUMER_REGISTERS,
            "PRODUCER_REGISTERS": self._PRODUCER_REGISTERS,
        }  # fmt: skip
        names = (
            "q", "k", "v", "out", "counts", "cu_q", "kv_lens", "row_seqs", "page_table", "kv_pool", "q_row",
            "q_group", "k_row", "k_group", "v_row", "v_group", "out_row", "out_group", "scale", "layers",
            "layer", "max_pages",
        )  # fmt: skip
        return launch(
            "paged_attention.gluon_context:specialized_context",
            pick(self._arguments(signature, target), names),
            constants,
            (GridDim(0, target.sm_count),),
            num_warps=4,
            num_stages=1,
        )


_SAFE_TILE = ContextTile(64, 64, 4, 2)

TACTICS: tuple[PagedAttention, ...] = (
    Tiled(_SAFE_TILE),
    Split(_SAFE_TILE),
    Split(ContextTile(128, 64, 8, 2)),
    Split(ContextTile(128, 64, 8, 3)),
    Split(ContextTile(128, 128, 8, 2)),
    Split(ContextTile(64, 64, 4, 3)),
    Split(ContextTile(64, 64, 4, 2), packed=True),
    Split(ContextTile(128, 128, 8, 2), packed=True),
    Split(ContextTile(128, 64, 8, 3), packed=True),
    Split(ContextTile(128, 64, 8, 2), packed=True),
    Split(ContextTile(64, 64, 4, 3), packed=True),
    Specialized(128, 4),
    Specialized(64, 8),
    Split(None),
    Split(None, block_n=32, stages=4),
    Split(None, block_n=128, stages=2),
)
