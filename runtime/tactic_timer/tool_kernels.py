"""Calls of the pack's own kernels: fill operands, compare results (see plugins/tactic_check)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from tapeout.plugins.tactic_check.tools import ARGUMENTS, BLOCK, tool_name
from tapeout.runtime.tactic_timer.device import Kernels

_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class ToolKernels:
    """Queues the tools; every method returns at once."""

    def __init__(self, kernels: Kernels, tools: Mapping[str, int]) -> None:
        self._kernels, self._tools = kernels, tools

    def fill_normal(
        self, address: int, dtype: str, rows: int, columns: int, row_stride: int, seed: int, factor: float
    ) -> None:
        blocks = -(-columns // BLOCK)
        self._launch(
            "fill_normal", dtype, rows * blocks, (address, columns, row_stride, blocks, seed, factor)
        )

    def fill_integers(
        self, address: int, rows: int, columns: int, row_stride: int, seed: int, high: int
    ) -> None:
        blocks = -(-columns // BLOCK)
        self._launch("fill_integers", "", rows * blocks, (address, columns, row_stride, blocks, seed, high))

    def fill_cache(
        self, pool: int, dtype: str, used: int, pages: int, heads2: int, tokens: int, dim: int,
        layers: int, layer: int, seed: int, factor: float,
    ) -> None:  # fmt: skip
        """One layer of a pool; `used` is the address of int32 [pages], heads2 is 2 * kv_heads."""
        blocks = -(-tokens * dim // BLOCK)
        values = (pool, used, heads2, tokens * dim, dim, blocks, layers, layer, seed, factor)
        self._launch("fill_cache", dtype, pages * heads2 * blocks, values)

    def compare(
        self, got: int, wanted: int, dtype: str, result: int, rows: int, all_rows: int, columns: int,
        row_stride: int, absolute: float, relative: float,
    ) -> None:  # fmt: skip
        """Two outputs of `all_rows` rows, the first a guard row; `result` is int32 [4] to add to."""
        blocks = -(-row_stride // BLOCK)
        values = (got, wanted, result, rows, columns, row_stride, blocks, absolute, relative)
        self._launch("compare", dtype, all_rows * blocks, values)

    def compare_cache(
        self, got: int, wanted: int, dtype: str, result: int, elements: int, absolute: float, relative: float
    ) -> None:
        """Two KV pools; `result` is one int32 to add to."""
        values = (got, wanted, result, elements, absolute, relative)
        self._launch("compare_cache", dtype, -(-elements // BLOCK), values)

    def _launch(self, function: str, dtype: str, blocks: int, values: tuple[int | float, ...]) -> None:
        types = [_TYPES.get(kind, ctypes.c_void_p) for _, kind in ARGUMENTS[function]]
        self._kernels.launch(self._tools[tool_name(function, dtype)], (blocks, 1, 1), values, types)
