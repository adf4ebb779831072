"""The KV cache manager: pages, page tables and the prefix cache. See README.md."""

from tapeout.runtime.kv_cache.cache import AdmissionPages, CacheUser, KvCache, PinnedPrefix
from tapeout.runtime.kv_cache.options import PrefixCacheOptions
from tapeout.runtime.kv_cache.pages import NO_PAGE, CopyKind, PageCopies, PageCopy, pages_for
from tapeout.runtime.kv_cache.pool import PagePool
from tapeout.runtime.kv_cache.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from tapeout.runtime.kv_cache.statistics import CacheStats, RequestCacheStats

__all__ = [
    "NO_PAGE",
    "AdmissionPages",
    "CacheStats",
    "CacheUser",
    "CopyKind",
    "KvCache",
    "KvCacheRetentionConfig",
    "PageCopies",
    "PageCopy",
    "PagePool",
    "PinnedPrefix",
    "PrefixCacheOptions",
    "RequestCacheStats",
    "TokenRangeRetentionConfig",
    "pages_for",
]
