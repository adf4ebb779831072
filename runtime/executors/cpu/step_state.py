"""Step metadata at fixed addresses: allocation, checking and filling."""

from __future__ import annotations

import math

import numpy as np
import torch

from tapeout.plugins.cpu import StepState
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.manifest import KvCacheLayout, Limits
from tapeout.runtime.step import FROM_SLOT, StepInputs


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
        self._limits, self._vocab_size = limits, vocab_size
        self._num_pages = state.kv_pool.shape[0]
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
        token_ids = self._with_slot_ids(inputs, last_ids)
        problems = self._problems(inputs, token_ids)
        if problems:
            raise TapeoutError("the step's inputs are invalid:\n" + "\n".join(f"  {p}" for p in problems))
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

    def _with_slot_ids(self, inputs: StepInputs, last_ids: np.ndarray) -> np.ndarray:
        wanted = inputs.token_ids == FROM_SLOT
        if not wanted.any() or len(inputs.cu_q) != len(inputs.slots) + 1:
            return inputs.token_ids
        slots_of_rows = np.repeat(inputs.slots, np.maximum(np.diff(inputs.cu_q), 0))
        if len(slots_of_rows) != len(inputs.token_ids) or not _within(inputs.slots, len(last_ids)):
            return inputs.token_ids
        return np.where(wanted, last_ids[slots_of_rows], inputs.token_ids)

    def _problems(self, inputs: StepInputs, token_ids: np.ndarray) -> list[str]:
        limits = self._limits
        t, b, r = len(token_ids), len(inputs.slots), len(inputs.row_ids)
        max_batch = limits.max_batch_size
        rules = [
            (1 <= t <= limits.max_num_tokens, f"{t} token rows, expected 1 to {limits.max_num_tokens}"),
            (1 <= b <= max_batch, f"{b} sequences, expected 1 to {max_batch}"),
            (r <= max_batch, f"{r} logit rows, expected at most {max_batch}"),
            (len(inputs.positions) == t, f"{len(inputs.positions)} positions for {t} rows"),
            (len(inputs.cu_q) == b + 1, f"{len(inputs.cu_q)} row offsets for {b} sequences"),
            (len(inputs.kv_lens) == b, f"{len(inputs.kv_lens)} cache lengths for {b} sequences"),
            (inputs.page_table.shape[:1] == (b,), f"page table {inputs.page_table.shape} for {b} sequences"),
            (len(inputs.row_slots) == r, f"{len(inputs.row_slots)} slots for {r} logit rows"),
        ]
        problems = [text for fine, text in rules if not fine]
        return problems or self._value_problems(inputs, token_ids)

    def _value_problems(self, inputs: StepInputs, token_ids: np.ndarray) -> list[str]:
        limits, vocab, t = self._limits, self._vocab_size, len(token_ids)
        lengths = np.diff(inputs.cu_q)
        needed = -(-inputs.kv_lens // limits.tokens_per_page)
        width = inputs.page_table.shape[1]
        used = inputs.page_table[np.arange(width)[None, :] < needed[:, None]]
        offsets_fine = inputs.cu_q[0] == 0 and inputs.cu_q[-1] == t and lengths.min() > 0
        rules = [
            (_within(token_ids, vocab), f"token ids outside [0, {vocab}), or a slot without one"),
            (_within(inputs.positions, limits.max_seq_len), f"positions outside [0, {limits.max_seq_len})"),
            (offsets_fine, f"row offsets {inputs.cu_q.tolist()} for {t} rows"),
            (bool((inputs.kv_lens >= lengths).all()), "a cache length below the rows of its sequence"),
            (inputs.kv_lens.max() <= limits.max_seq_len, f"a cache length above {limits.max_seq_len}"),
            (needed.max() <= width, f"a page table of {width} pages for {needed.max()}"),
            (_within(used, self._num_pages), f"page ids outside [0, {self._num_pages})"),
            (_within(inputs.row_ids, t), f"logit rows outside [0, {t})"),
            (_within(inputs.slots, limits.max_batch_size), f"slots outside [0, {limits.max_batch_size})"),
            (_within(inputs.row_slots, limits.max_batch_size), f"slots outside [0, {limits.max_batch_size})"),
        ]
        return [text for fine, text in rules if not fine]


def _within(values: np.ndarray, stop: int) -> bool:
    return values.size == 0 or bool(values.min() >= 0 and values.max() < stop)
