"""Whole pages on a GPU: copies within the pool, and to and from pinned memory, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

from tapeout.plugins.errors import CapacityError
from tapeout.runtime.executors.cuda.driver import Event, PinnedMemory, Stream
from tapeout.runtime.executors.memory import BudgetLine, check_budget
from tapeout.runtime.host_memory import available_host_bytes
from tapeout.runtime.kv_cache.pages import CopyKind, PageCopy


class PageMemory:
    """Copies pages of the pool at `pool_address` beside the steps that run.

    Copies follow each other on one stream, and the next step waits for those queued before it. They wait
    for no step: a page that is copied or written is one no unread step writes or uses (`PageCopies`), so
    they run while the step before is still running.

    Args:
        page_bytes: of one page, K and V of all layers.
        host_pages: pages of the host tier, pinned at once.

    Raises:
        CapacityError: the host has no memory, or none that may be locked, for its tier.
    """

    def __init__(self, pool_address: int, page_bytes: int, host_pages: int) -> None:
        self._pool_address, self._page_bytes = pool_address, page_bytes
        with ExitStack() as stack:
            self._host_address = 0
            line = BudgetLine("host tier of the kv cache", host_pages * page_bytes, "lower host_cache_bytes")
            check_budget("the host tier", [line], available_host_bytes())
            if host_pages:
                pinned = stack.enter_context(closing(_pinned(host_pages * page_bytes)))
                self._host_address = pinned.address
            self._stream = stack.enter_context(closing(Stream()))
            self._done = stack.enter_context(closing(Event()))
            stack.callback(self._stream.wait)  # before anything above is freed
            self._resources = stack.pop_all()

    def copy(self, copies: Sequence[PageCopy], steps: Stream) -> None:
        """Queue copies, in order, and make later work on `steps` wait for them; waits for nothing.

        The page numbers have been checked.
        """
        size = self._page_bytes
        for (kind, source, target), count in _runs(copies):
            device, host = self._pool_address, self._host_address
            if kind is CopyKind.WITHIN:
                self._stream.copy(device + target * size, device + source * size, count * size)
            elif kind is CopyKind.OFFLOAD:
                self._stream.download(host + target * size, device + source * size, count * size)
            else:
                self._stream.upload(device + target * size, host + source * size, count * size)
        self._done.record(self._stream)
        steps.wait_for(self._done)

    def close(self) -> None:
        self._resources.close()


def _pinned(size_bytes: int) -> PinnedMemory:
    try:
        return PinnedMemory(size_bytes)
    except CapacityError as error:  # there is memory, but not that much may be locked
        raise CapacityError(error.message, hint="lower host_cache_bytes") from None


def _runs(copies: Sequence[PageCopy]) -> Iterator[tuple[PageCopy, int]]:
    """Copies with how many pages each is: neighbours that go to neighbours are one copy."""
    first, count = copies[0], 0
    for copy in copies:
        kind, source, target = first
        if count and copy == (kind, source + count, target + count) and not _meet(first, count):
            count += 1
            continue
        if count:
            yield first, count
        first, count = copy, 1
    yield first, count


def _meet(first: PageCopy, count: int) -> bool:
    """Whether a run that is one page longer would read a page it writes."""
    return first.kind is CopyKind.WITHIN and abs(first.source - first.target) <= count
