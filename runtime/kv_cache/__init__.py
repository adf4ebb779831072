"""The KV cache manager: pages, page tables and the prefix cache. See README.md."""

from tapeout.runtime.kv_cache.cache import KvCache
from tapeout.runtime.kv_cache.events import CacheEvent, EventKind, Tier
from tapeout.runtime.kv_cache.options import PrefixCacheOptions
from tapeout.runtime.kv_cache.pages import NO_PAGE, CopyKind, PageCopies, PageCopy, pages_for
from tapeout.runtime.kv_cache.pool import PagePool
from tapeout.runtime.kv_cache.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from tapeout.runtime.kv_cache.statistics import CacheStats, RequestCacheStats
from tapeout.runtime.kv_cache.users import AdmissionPages, CacheUser, PinnedPrefix, RequestCache

__all__ = [
    "NO_PAGE",
    "AdmissionPages",
    "CacheEvent",
    "CacheStats",
    "CacheUser",
    "CopyKind",
    "EventKind",
    "KvCache",
    "KvCacheRetentionConfig",
    "PageCopies",
    "PageCopy",
    "PagePool",
    "PinnedPrefix",
    "PrefixCacheOptions",
    "RequestCache",
    "RequestCacheStats",
    "Tier",
    "TokenRangeRetentionConfig",
    "pages_for",
]
