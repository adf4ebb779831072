"""Page numbers of copies, checked before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.kv_cache.pages import CopyKind, PageCopy


def check_copies(copies: Sequence[PageCopy], num_pages: int, host_pages: int) -> None:
    """Raises TapeoutError with the first few copies from or to a page that does not exist."""
    pools = {
        CopyKind.WITHIN: (num_pages, num_pages),
        CopyKind.OFFLOAD: (num_pages, host_pages),
        CopyKind.ONBOARD: (host_pages, num_pages),
    }
    wrong = [
        f"  {kind.name} {source} -> {target}"
        for kind, source, target in copies
        if not (0 <= source < pools[kind][0] and 0 <= target < pools[kind][1])
    ]
    if wrong:
        raise TapeoutError(
            f"page copies outside {num_pages} device pages and {host_pages} host pages:\n"
            + "\n".join(wrong[:5])
        )
