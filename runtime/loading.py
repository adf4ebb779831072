"""From an engine file to an executor that is ready: opened, checked, its KV pool sized."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tapeout.plugins.sample.params import unsupported_generation_settings
from tapeout.runtime.engine import Engine, open_engine
from tapeout.runtime.kv_budget import plan_kv_pool
from tapeout.runtime.kv_cache import PrefixCacheOptions
from tapeout.runtime.laps import Laps
from tapeout.runtime.llm_options import check_options
from tapeout.runtime.new_loop import SchedulerOptions
from tapeout.runtime.step import Executor
from tapeout.runtime.tokenizer import Tokenizer

logger = logging.getLogger("tapeout")


@dataclass(frozen=True)
class Loaded:
    """Close the executor, then the engine."""

    engine: Engine
    options: SchedulerOptions
    num_pages: int
    tokenizer: Tokenizer | None
    executor: Executor


def load(
    path: str,
    cache_options: PrefixCacheOptions,
    laps: Laps,
    *,
    strict_sku: bool,
    threads: int | None,
    kv_cache_bytes: int | None,
    max_tokens_in_kv_cache: int | None,
    free_memory_fraction: float,
    **schedulers: Any,
) -> Loaded:
    """Load an engine; `LLM` says what the arguments are, and what is raised. Nothing stays open then."""
    # Executors bring native-code loading with them, which importing `LLM` need not pay for.
    from tapeout.runtime.executors import is_cuda, load_executor, memory_left

    laps.lap("executor_import")
    engine = open_engine(path, verify=False)
    laps.lap("open_engine")
    try:
        limits = engine.manifest.limits
        options = check_options(limits, threads=threads, **schedulers)
        page_bytes = engine.manifest.kv_cache.page_bytes(limits.tokens_per_page)
        host_pages = cache_options.host_pages(page_bytes)
        budget = plan_kv_pool(
            limits=limits,
            page_bytes=page_bytes,
            free_bytes=memory_left(engine, strict_sku=strict_sku),
            free_memory_fraction=free_memory_fraction,
            max_tokens=max_tokens_in_kv_cache,
            kv_cache_bytes=kv_cache_bytes,
        )
        logger.info(budget.describe())
        laps.lap("device")
        # Only where the engine can run at all: this reads it. A GPU's weights are checked while copied.
        engine.verify(weights=not is_cuda(engine))
        laps.lap("checksums")
        _warn_about_generation_config(engine)
        tokenizer = _load_tokenizer(engine)
        laps.lap("tokenizer")
        executor = load_executor(
            engine, num_pages=budget.num_pages, host_pages=host_pages, threads=threads, laps=laps
        )
    except BaseException:
        engine.close()
        raise
    return Loaded(engine, options, budget.num_pages, tokenizer, executor)


def text_of(engine: Engine, name: str) -> str | None:
    """A text of the engine, None when it has none of that name."""
    return engine.text(name).decode() if name in engine.text_names else None


def eos_token_ids(engine: Engine) -> frozenset[int]:
    """Ids that end a request of their own."""
    if engine.manifest.tokenizer is not None:
        return frozenset(engine.manifest.tokenizer.eos_token_ids)
    ids = engine.manifest.generation.get("eos_token_id")
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def _warn_about_generation_config(engine: Engine) -> None:
    """Once an engine, not with every request: what the model's defaults ask for and do not get."""
    if ignored := unsupported_generation_settings(engine.manifest.generation):
        logger.warning("the model's generation config asks for what is not supported: %s", ", ".join(ignored))


def _load_tokenizer(engine: Engine) -> Tokenizer | None:
    text = text_of(engine, "tokenizer.json")
    facts = engine.manifest.tokenizer
    return None if text is None or facts is None else Tokenizer(text, facts)
