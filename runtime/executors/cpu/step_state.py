"""Step metadata at fixed addresses: allocation and filling."""

from __future__ import annotations

import math

import numpy as np
import torch

from tapeout.plugins.cpu import StepState
from tapeout.runtime.engine.manifest import KvCacheLayout, Limits
from tapeout.runtime.executors.step_check import StepChecker
from tapeout.runtime.step import StepInputs


def allocate_step_state(limits: Limits, kv: KvCacheLayout, num_pages: int) -> StepState:
    """All tensors, zeroed. Raises RuntimeError (torch's) when the KV pool cannot be allocated."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    batch, pages = limits.max_batch_size, limits.pages_per_sequence
    pool = (num_pages, kv.layers, 2, kv.kv_heads, limits.tokens_per_page, kv.head_dim)
    return StepState(
        counts=zeros(4),
        token_ids=zeros(limits.max_num_tokens),
        positions=zeros(limits.max_num_tokens),
        cu_q=zeros(batch + 1),
        kv_lens=zeros(batch),
        page_table=zeros(batch, pages),
        row_ids=zeros(batch),
        kv_pool=_lazy_zeros(pool, getattr(torch, kv.dtype)),
        tokens_per_page=limits.tokens_per_page,
    )


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system gives on first use: a large pool costs neither time nor memory
    until requests fill it (torch.zeros would write all of it)."""
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, np.uint8)).view(dtype).view(shape)


class StepWriter:
    """Writes one step's inputs into a `StepState`, after checking all that a kernel would trust."""

    def __init__(self, state: StepState, limits: Limits, vocab_size: int) -> None:
        self._checker = StepChecker(limits, vocab_size, state.kv_pool.shape[0])
        self._counts = state.counts.numpy()
        self._token_ids = state.token_ids.numpy()
        self._positions = state.positions.numpy()
        self._cu_q = state.cu_q.numpy()
        self._kv_lens = state.kv_lens.numpy()
        self._page_table = state.page_table.numpy()
        self._row_ids = state.row_ids.numpy()

    def write(self, inputs: StepInputs, last_ids: np.ndarray) -> tuple[int, int]:
        """Fill the state; FROM_SLOT ids come from `last_ids` [max_batch_size]. Returns (T, R).

        Raises TapeoutError with every fault; then nothing was written.
        """
        token_ids = self._checker.check(inputs, last_ids)
        t, b, r = len(token_ids), len(inputs.slots), len(inputs.row_ids)
        lengths = np.diff(inputs.cu_q)
        self._counts[:] = (t, b, lengths.max(), inputs.kv_lens.max())
        self._token_ids[:t] = token_ids
        self._positions[:t] = inputs.positions
        self._cu_q[: b + 1] = inputs.cu_q
        self._kv_lens[:b] = inputs.kv_lens
        width = min(inputs.page_table.shape[1], self._page_table.shape[1])
        self._page_table[:b, :width] = inputs.page_table[:, :width]
        self._page_table[:b, width:] = -1
        self._row_ids[:r] = inputs.row_ids
        return t, r
