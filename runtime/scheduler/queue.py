"""The requests that wait for a slot, in the order in which they are to get one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tapeout.runtime.scheduler.request import Request

_FEW = 64


class WaitingQueue:
    """A priority queue by `Request.rank` from which any request can be taken.

    Looking at the first one costs the same however many wait; adding and taking cost the logarithm of
    their number. A request taken out of turn leaves its entry in the heap, which is dropped when it
    comes to the top, or with all others of its kind once they are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self._members.values())

    def get(self, request_id: str) -> Request | None:
        return self._members.get(request_id)

    def add(self, request: Request) -> None:
        """Ranks are unique, so that requests themselves are never compared."""
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.rank, request))

    def first(self) -> Request | None:
        """Who is to get the next slot."""
        while self._heap and not self._waits(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, request_id: str) -> Request | None:
        """Take a request out; None when it does not wait."""
        request = self._members.pop(request_id, None)
        if request is None:
            return None
        if self._heap[0][1] is request:
            heapq.heappop(self._heap)  # a paused request comes back: it must not find its old entry
        elif len(self._heap) > 2 * len(self._members) + _FEW:
            self._heap = [entry for entry in self._heap if self._waits(entry[1])]
            heapq.heapify(self._heap)
        return request

    def _waits(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request
