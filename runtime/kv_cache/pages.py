"""What a page is to everybody: how many tokens need how many, and how page copies are told."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

NO_PAGE = -1


def pages_for(num_tokens: int, tokens_per_page: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // tokens_per_page)


class CopyKind(IntEnum):
    """Where a page copy reads and writes. Indices are pages of the device's pool or of the host's."""

    WITHIN = 0  #: device page to device page
    OFFLOAD = 1  #: device page to host page
    ONBOARD = 2  #: host page to device page


class PageCopy(NamedTuple):
    """All bytes of one page, K and V of all layers, from `source` to `target`."""

    kind: CopyKind
    source: int
    target: int


class PageCopies(Protocol):
    """What an executor does with whole pages.

    Attributes:
        num_pages, host_pages: pages of its device pool and of its host pool (0 = it has none).
    """

    num_pages: int
    host_pages: int

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Queue copies and return at once. They take effect in the order given, before any step that is
        submitted later.

        No step that was submitted before and has not been read may write a page that is read here, or use
        a page that is written here: copies may overtake such steps.

        Raises:
            TapeoutError: a page that does not exist; then nothing was queued.
        """
