"""Every number of a step that a kernel would trust, checked before anything is queued."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.step import FROM_SLOT, StepInputs

_INT32 = np.dtype(np.int32)
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
        offsets_fine = _offsets_fine(inputs)
        token_ids = self._with_slot_ids(inputs, last_ids) if offsets_fine else inputs.token_ids
        problems = self._problems(inputs, token_ids, offsets_fine)
        if problems:
            raise TapeoutError("the step's inputs are invalid:\n" + "\n".join(f"  {p}" for p in problems))
        return token_ids

    def _with_slot_ids(self, inputs: StepInputs, last_ids: np.ndarray) -> np.ndarray:
        wanted = inputs.token_ids == FROM_SLOT
        if not wanted.any() or not _within(inputs.slots, len(last_ids)):
            return inputs.token_ids
        slots_of_rows = _of_rows(inputs.slots, _lengths(inputs), len(inputs.token_ids))
        return np.where(wanted, last_ids[slots_of_rows], inputs.token_ids)

    def _problems(self, inputs: StepInputs, token_ids: np.ndarray, offsets_fine: bool) -> list[str]:
        limits = self._limits
        t, b, r = len(token_ids), len(inputs.slots), len(inputs.row_ids)
        max_batch = limits.max_batch_size
        dtypes = {array.dtype for array in vars(inputs).values()}
        problems = _unmet(
            (dtypes == {_INT32}, lambda: f"arrays of {', '.join(sorted(map(str, dtypes)))}, expected int32"),
            (
                1 <= t <= limits.max_num_tokens,
                lambda: f"{t} token rows, expected 1 to {limits.max_num_tokens}",
            ),
            (1 <= b <= max_batch, lambda: f"{b} sequences, expected 1 to {max_batch}"),
            (r <= max_batch, lambda: f"{r} logit rows, expected at most {max_batch}"),
            (len(inputs.positions) == t, lambda: f"{len(inputs.positions)} positions for {t} rows"),
            (len(inputs.cu_q) == b + 1, lambda: f"{len(inputs.cu_q)} row offsets for {b} sequences"),
            (len(inputs.kv_lens) == b, lambda: f"{len(inputs.kv_lens)} cache lengths for {b} sequences"),
            (
                inputs.page_table.shape[:1] == (b,),
                lambda: f"page table {inputs.page_table.shape} for {b} sequences",
            ),
            (len(inputs.row_slots) == r, lambda: f"{len(inputs.row_slots)} slots for {r} logit rows"),
        )
        return problems or self._value_problems(inputs, token_ids, offsets_fine)

    def _value_problems(self, inputs: StepInputs, token_ids: np.ndarray, offsets_fine: bool) -> list[str]:
        limits, vocab, t = self._limits, self._vocab_size, len(token_ids)
        max_len, max_batch = limits.max_seq_len, limits.max_batch_size
        lengths, kv_lens = _lengths(inputs), inputs.kv_lens
        longest, width = int(kv_lens.max()), inputs.page_table.shape[1]
        most_pages = -(-longest // limits.tokens_per_page)
        rows_fine = _within(inputs.row_ids, t)
        # What follows from offsets and rows is asked only where these are sound.
        written = slots_fine = True
        if offsets_fine:
            # As unsigned numbers, so that this says that none is negative as well.
            above = inputs.positions.view(np.uint32) >= _of_rows(kv_lens, lengths, t).view(np.uint32)
            written = not above.any()
        if offsets_fine and rows_fine:
            slots = _of_rows(inputs.slots, lengths, t)[inputs.row_ids]
            slots_fine = bool((slots == inputs.row_slots).all())
        return _unmet(
            (_within(token_ids, vocab), lambda: f"token ids outside [0, {vocab}), or a slot without one"),
            (
                (written and longest <= max_len) or _within(inputs.positions, max_len),
                lambda: f"positions outside [0, {max_len})",
            ),
            (offsets_fine, lambda: f"row offsets {inputs.cu_q.tolist()} for {t} rows"),
            (not (kv_lens < lengths).any(), lambda: "a cache length below the rows of its sequence"),
            (longest <= max_len, lambda: f"a cache length above {max_len}"),
            (most_pages <= width, lambda: f"a page table of {width} pages for {most_pages}"),
            (self._have_pages(inputs), lambda: f"page ids outside [0, {self._num_pages})"),
            (rows_fine, lambda: f"logit rows outside [0, {t})"),
            (_within(inputs.slots, max_batch), lambda: f"slots outside [0, {max_batch})"),
            (written, lambda: "a position at or above its sequence's cache length"),
            (
                slots_fine,
                lambda: f"slots {inputs.row_slots.tolist()} for logit rows of slots {slots.tolist()}",
            ),
        )

    def _have_pages(self, inputs: StepInputs) -> bool:
        """Whether all page ids that a sequence needs are pages of the pool."""
        missing = inputs.page_table.view(np.uint32) >= self._num_pages
        # Column c is needed by sequences longer than c pages.
        first_tokens = np.arange(missing.shape[1], dtype=np.int32) * self._limits.tokens_per_page
        return not (missing & (first_tokens < inputs.kv_lens[:, None])).any()


def forget_ids(last_ids: np.ndarray, row_slots: np.ndarray) -> np.ndarray:
    """After a failed step: what was planned on its ids must fail too instead of running on older ones.

    Returns the slots that have lost theirs.
    """
    slots = row_slots[(row_slots >= 0) & (row_slots < len(last_ids))]
    last_ids[slots] = NO_TOKEN
    return slots


def _unmet(*rules: tuple[bool, Callable[[], str]]) -> list[str]:
    """What the rules that are not met say. Steps come by the thousand and nearly all are fine, so a
    text is made only when it is told."""
    return [text() for fine, text in rules if not fine]


def _offsets_fine(inputs: StepInputs) -> bool:
    """Whether the row offsets give every sequence a row and all rows a sequence; nothing is sure yet."""
    cu_q, t = inputs.cu_q, len(inputs.token_ids)
    if len(cu_q) != len(inputs.slots) + 1 or len(cu_q) < 2 or cu_q[0] != 0 or cu_q[-1] != t:
        return False
    # Compared, not subtracted: differences of wrong offsets may overflow into right ones.
    return bool((cu_q[1:] > cu_q[:-1]).all())


def _lengths(inputs: StepInputs) -> np.ndarray:
    """[B] rows of each sequence."""
    return inputs.cu_q[1:] - inputs.cu_q[:-1]


def _of_rows(values: np.ndarray, lengths: np.ndarray, num_rows: int) -> np.ndarray:
    """[num_rows] from one value a sequence; where there are as many, every sequence has one row."""
    return values if len(values) == num_rows else np.repeat(values, lengths)


def _within(values: np.ndarray, stop: int) -> bool:
    # As unsigned numbers, negative ones are above every limit.
    return values.size == 0 or bool(values.view(np.uint32).max() < stop)
