"""The lean half of tapeout: engine format, executors, KV cache, schedulers, sampling, `LLM`.

    from tapeout.runtime import LLM, SamplingParams, TapeoutError

Names load when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tapeout.plugins.errors import (
        CapacityError,
        EngineCorruptError,
        EngineError,
        EngineIncompatibleError,
        TapeoutError,
        UsageError,
    )
    from tapeout.plugins.sample.params import SamplingParams
    from tapeout.plugins.sample.result import Logprob
    from tapeout.runtime.kv_cache.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
    from tapeout.runtime.llm import LLM
    from tapeout.runtime.output import CompletionOutput, RequestMetrics, RequestOutput

__all__ = [
    "LLM",
    "CapacityError",
    "CompletionOutput",
    "EngineCorruptError",
    "EngineError",
    "EngineIncompatibleError",
    "KvCacheRetentionConfig",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TapeoutError",
    "TokenRangeRetentionConfig",
    "UsageError",
]

_HOMES = {
    "CapacityError": "tapeout.plugins.errors",
    "EngineCorruptError": "tapeout.plugins.errors",
    "EngineError": "tapeout.plugins.errors",
    "EngineIncompatibleError": "tapeout.plugins.errors",
    "TapeoutError": "tapeout.plugins.errors",
    "UsageError": "tapeout.plugins.errors",
    "KvCacheRetentionConfig": "tapeout.runtime.kv_cache.retention",
    "LLM": "tapeout.runtime.llm",
    "CompletionOutput": "tapeout.runtime.output",
    "RequestMetrics": "tapeout.runtime.output",
    "RequestOutput": "tapeout.runtime.output",
    "SamplingParams": "tapeout.plugins.sample.params",
    "TokenRangeRetentionConfig": "tapeout.runtime.kv_cache.retention",
    "Logprob": "tapeout.plugins.sample.result",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
