"""Every number of a step that a kernel would trust, checked before anything is queued."""

from __future__ import annotations

import numpy as np

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.step import FROM_SLOT, StepInputs

NO_TOKEN = -2  # last id of a slot whose request has sampled nothing yet, or whose step failed


class StepChecker:
    """Checks steps against an engine's limits, its vocabulary and the executor's pool."""

    def __init__(self, limits: Limits, vocab_size: int, num_pages: int) -> None:
        self._limits, self._vocab_size, self._num_pages = limits, vocab_size, num_pages

    def check(self, inputs: StepInputs, last_ids: np.ndarray) -> np.ndarray:
        """The step's token ids, FROM_SLOT ones taken from `last_ids` [max_batch_size].

        Where ids stay on a device, any valid id in `last_ids` says that the slot has one.

        Raises:
            TapeoutError: with every fault.
        """
        token_ids = self._with_slot_ids(inputs, last_ids)
        problems = self._problems(inputs, token_ids)
        if problems:
            raise TapeoutError("the step's inputs are invalid:\n" + "\n".join(f"  {p}" for p in problems))
        return token_ids

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
        rows_fine = _within(inputs.row_ids, t)
        rules = [
            (_within(token_ids, vocab), f"token ids outside [0, {vocab}), or a slot without one"),
            (_within(inputs.positions, limits.max_seq_len), f"positions outside [0, {limits.max_seq_len})"),
            (offsets_fine, f"row offsets {inputs.cu_q.tolist()} for {t} rows"),
            (bool((inputs.kv_lens >= lengths).all()), "a cache length below the rows of its sequence"),
            (inputs.kv_lens.max() <= limits.max_seq_len, f"a cache length above {limits.max_seq_len}"),
            (needed.max() <= width, f"a page table of {width} pages for {needed.max()}"),
            (_within(used, self._num_pages), f"page ids outside [0, {self._num_pages})"),
            (rows_fine, f"logit rows outside [0, {t})"),
            (_within(inputs.slots, limits.max_batch_size), f"slots outside [0, {limits.max_batch_size})"),
            (_within(inputs.row_slots, limits.max_batch_size), f"slots outside [0, {limits.max_batch_size})"),
        ]
        if offsets_fine:
            written = inputs.positions < np.repeat(inputs.kv_lens, lengths)
            rules.append((bool(written.all()), "a position at or above its sequence's cache length"))
        if offsets_fine and rows_fine:
            slots = np.repeat(inputs.slots, lengths)[inputs.row_ids]
            same = np.array_equal(slots, inputs.row_slots)
            rules.append(
                (same, f"slots {inputs.row_slots.tolist()} for logit rows of slots {slots.tolist()}")
            )
        return [text for fine, text in rules if not fine]


def forget_ids(last_ids: np.ndarray, row_slots: np.ndarray) -> None:
    """After a failed step: steps planned on its ids must fail too instead of running on older ones."""
    last_ids[row_slots[(row_slots >= 0) & (row_slots < len(last_ids))]] = NO_TOKEN


def _within(values: np.ndarray, stop: int) -> bool:
    return values.size == 0 or bool(values.min() >= 0 and values.max() < stop)
