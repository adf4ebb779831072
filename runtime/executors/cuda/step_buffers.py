"""The step's metadata on the device: one pinned buffer, one copy a step.

Several pinned copies take turns, because the host writes step n+1 while the copy of step n may
still be reading.
"""

from __future__ import annotations

from contextlib import ExitStack, closing

import numpy as np

from tapeout.plugins.cuda import MAX_KV_HEADS
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.executors.cuda.driver import DeviceMemory, Event, PinnedMemory, Stream
from tapeout.runtime.step import StepInputs

_TURNS = 3
_ALIGNMENT_INTS = 64  # every tensor starts on 256 bytes


class StepBuffers:
    """Layout, host copies and device copy of the int32 step tensors (see plugins/cuda.py)."""

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
            # Largest of all, so last of those that are copied: the copy ends with the step's last sequence.
            "page_table": batch * self.max_pages,
            "arrivals": batch * MAX_KV_HEADS,  # the kernels' own
        }
        self._sequences = np.arange(batch, dtype=np.int32)
        self._offsets, end = {}, 0
        for name, size in sizes.items():
            self._offsets[name] = end
            end += -(-size // _ALIGNMENT_INTS) * _ALIGNMENT_INTS
        with ExitStack() as stack:
            self.device = stack.enter_context(closing(DeviceMemory(end * 4, "step metadata")))
            self.device.zero()
            self._turns = [
                (stack.enter_context(closing(PinnedMemory(end * 4))), stack.enter_context(closing(Event())))
                for _ in range(_TURNS)
            ]
            self._resources = stack.pop_all()
        self._next = 0

    def address(self, name: str) -> int:
        """Device address of a step tensor."""
        return self.device.address + 4 * self._offsets[name]

    def upload(self, inputs: StepInputs, stream: Stream) -> None:
        """Write one step's tensors and queue their copy. Rows beyond the counts stay stale, but for row ids:
        there they are 0, since TensorRT segments look at all rows of a bucket.

        The step has been checked (see step_check.py).
        """
        memory, event = self._turns[self._next]
        self._next = (self._next + 1) % _TURNS
        event.wait()  # the copy that last read this buffer
        host = memory.array.view(np.int32)

        def put(name: str, values: np.ndarray | tuple[int, ...]) -> None:
            start = self._offsets[name]
            host[start : start + len(values)] = values

        lengths = inputs.cu_q[1:] - inputs.cu_q[:-1]
        rows, sequences = len(inputs.token_ids), len(inputs.slots)
        row_seqs = self._sequences[:sequences]
        if rows != sequences:
            row_seqs = np.repeat(row_seqs, lengths)
        put("counts", (rows, sequences, lengths.max(), inputs.kv_lens.max(), len(inputs.row_ids)))
        put("cu_q", inputs.cu_q)
        put("kv_lens", inputs.kv_lens)
        put("row_ids", inputs.row_ids)
        start = self._offsets["row_ids"]
        host[start + len(inputs.row_ids) : start + len(self._sequences)] = 0
        put("seq_slots", inputs.slots)
        put("token_ids", inputs.token_ids)
        put("positions", inputs.positions)
        put("row_seqs", row_seqs)
        start = self._offsets["page_table"]
        used = start + sequences * self.max_pages
        width = min(inputs.page_table.shape[1], self.max_pages)
        table = host[start:used].reshape(sequences, self.max_pages)
        table[:, :width] = inputs.page_table[:, :width]
        stream.upload(self.device.address, memory.address, 4 * used)
        event.record(stream)

    def close(self) -> None:
        self._resources.close()
