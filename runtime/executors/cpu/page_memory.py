"""Whole pages on `cpu`: the pool as bytes, and a second buffer as its host tier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tapeout.runtime.kv_cache.pages import CopyKind, PageCopy


class PageMemory:
    """Copies pages of `kv_pool` [pages, ...] among themselves and to and from `host_pages` others.

    Pages of the host tier take memory when they are first written.
    """

    def __init__(self, kv_pool: torch.Tensor, host_pages: int) -> None:
        device = kv_pool.view(kv_pool.shape[0], -1).view(torch.uint8).numpy()
        host = np.zeros((host_pages, device.shape[1]), np.uint8)
        self._pools = {
            CopyKind.WITHIN: (device, device),
            CopyKind.OFFLOAD: (device, host),
            CopyKind.ONBOARD: (host, device),
        }

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """In order; the page numbers have been checked."""
        for kind, source, target in copies:
            origin, goal = self._pools[kind]
            goal[target] = origin[source]
