"""What a user may say about the prefix cache of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import shown


@dataclass(frozen=True, kw_only=True)
class PrefixCacheOptions:
    """Options of the prefix cache; names as in TensorRT-LLM where it has them.

    Attributes:
        enable_prefix_reuse: keep pages after their request and use them for others.
        enable_partial_reuse: also copy the page that holds only the beginning of what is wanted.
        host_cache_bytes: memory on the host for pages that leave the device; 0 = none.
        event_buffer_max_size: events kept for `LLM.prefix_cache.events`; 0 = none are made.

    Raises:
        UsageError: naming every invalid value at once.
    """

    enable_prefix_reuse: bool = True
    enable_partial_reuse: bool = True
    host_cache_bytes: int = 0
    event_buffer_max_size: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {shown(value)}, expected True or False"
            for name in ("enable_prefix_reuse", "enable_partial_reuse")
            if not isinstance(value := getattr(self, name), bool)
        ]
        problems += [
            f"{name} = {shown(value)}, expected an integer of at least 0"
            for name in ("host_cache_bytes", "event_buffer_max_size")
            if not _is_count(value := getattr(self, name))
        ]
        if not problems and not self.enable_prefix_reuse and self.host_cache_bytes:
            problems.append(
                f"host_cache_bytes = {self.host_cache_bytes} without enable_prefix_reuse, expected 0: only "
                "pages that may be used again go to the host"
            )
        if problems:
            raise UsageError("invalid prefix cache options:\n" + "\n".join(f"  {p}" for p in problems))

    def host_pages(self, page_bytes: int) -> int:
        """Pages of the host tier.

        Raises:
            UsageError: `host_cache_bytes` is not 0 and less than one page.
        """
        if 0 < self.host_cache_bytes < page_bytes:
            raise UsageError(
                f"host_cache_bytes = {self.host_cache_bytes}, expected 0 or at least one page of "
                f"{page_bytes} bytes"
            )
        return self.host_cache_bytes // page_bytes


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0
