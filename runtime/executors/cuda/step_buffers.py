"""The step's metadata: pinned inboxes that the host writes and the step's first kernel reads.

Several inboxes take turns, because the host writes step n+1 while step n may still be reading. Host and
device count the turns apart from each other: the host when a step was launched, the device when it read it.
"""

from __future__ import annotations

from contextlib import ExitStack, closing

import numpy as np

from tapeout.plugins.cuda import MAX_KV_HEADS, TURNS
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.executors.cuda.driver import DeviceMemory, Event, PinnedMemory, Stream
from tapeout.runtime.step import FROM_SLOT, StepInputs

_ALIGNMENT_INTS = 64  # every tensor starts on 256 bytes


class StepBuffers:
    """Layout, inboxes and device copy of the int32 step tensors (see plugins/cuda.py)."""

    def __init__(self, limits: Limits) -> None:
        self.max_pages = -(-limits.max_seq_len // limits.tokens_per_page)
        batch, tokens = limits.max_batch_size, limits.max_num_tokens
        sizes = {
            "counts": 5,
            "cu_q": batch + 1,
            "kv_lens": batch,
            "row_ids": batch,
            "seq_slots": batch,
            "token_ids": tokens,
            "positions": tokens,
            "row_seqs": tokens,
            "page_table": batch * self.max_pages,
            # The kernels' own: they have no place in an inbox.
            "arrivals": batch * MAX_KV_HEADS,
            "turns": 2,
        }
        self._sequences = np.arange(batch, dtype=np.int32)
        self._offsets, end = {}, 0
        for name, size in sizes.items():
            self._offsets[name] = end
            end += -(-size // _ALIGNMENT_INTS) * _ALIGNMENT_INTS
        self.inbox_words = self._offsets["arrivals"]
        with ExitStack() as stack:
            self._device = stack.enter_context(closing(DeviceMemory(end * 4, "step metadata")))
            self._device.zero()
            self._inbox = stack.enter_context(closing(PinnedMemory(TURNS * self.inbox_words * 4)))
            self._events = [stack.enter_context(closing(Event())) for _ in range(TURNS)]
            self._resources = stack.pop_all()
        self._boxes = self._inbox.array.view(np.int32).reshape(TURNS, self.inbox_words)
        self._turn = 0

    def address(self, name: str) -> int:
        """Address of a step tensor: on the device, but for the inbox."""
        if name == "inbox":
            return self._inbox.address
        return self._device.address + 4 * self._offsets[name]

    @property
    def turn(self) -> int:
        """Whose turn the next step is, from 0 to TURNS - 1."""
        return self._turn

    def write(self, inputs: StepInputs) -> None:
        """Write the tensors of the next step to its inbox, whose last step has ended by then. Elements beyond
        the counts stay stale.

        The step has been checked (see step_check.py). Until `next_turn`, another write takes its place.
        """
        self._events[self._turn].wait()
        box = self._boxes[self._turn]

        def put(name: str, values: np.ndarray | tuple[int, ...]) -> None:
            start = self._offsets[name]
            box[start : start + len(values)] = values

        lengths = inputs.cu_q[1:] - inputs.cu_q[:-1]
        rows, sequences = len(inputs.token_ids), len(inputs.slots)
        row_seqs, row_slots = self._sequences[:sequences], inputs.slots
        if rows != sequences:
            row_seqs = np.repeat(row_seqs, lengths)
            row_slots = row_slots[row_seqs]
        put("counts", (rows, sequences, lengths.max(), inputs.kv_lens.max(), len(inputs.row_ids)))
        put("cu_q", inputs.cu_q)
        put("kv_lens", inputs.kv_lens)
        put("row_ids", inputs.row_ids)
        put("seq_slots", inputs.slots)
        put("token_ids", np.where(inputs.token_ids == FROM_SLOT, -1 - row_slots, inputs.token_ids))
        put("positions", inputs.positions)
        put("row_seqs", row_seqs)
        start = self._offsets["page_table"]
        width = min(inputs.page_table.shape[1], self.max_pages)
        table = box[start : start + sequences * self.max_pages].reshape(sequences, self.max_pages)
        table[:, :width] = inputs.page_table[:, :width]

    def next_turn(self) -> Event:
        """The step that was written is launched. Returns the event to record at its end."""
        event = self._events[self._turn]
        self._turn = (self._turn + 1) % TURNS
        return event

    def recount(self, stream: Stream) -> None:
        """Take the turn from the device, where it is open whether a step was launched; waits."""
        turns = np.empty(1, np.int32)
        stream.download(turns.ctypes.data, self.address("turns"), turns.nbytes)
        stream.wait()  # so every inbox is free, also one whose event was not recorded
        self._turn = int(turns[0]) % TURNS

    def close(self) -> None:
        self._resources.close()
