"""How long cached pages are worth keeping: TensorRT-LLM's KvCacheRetentionConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import shown

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 35, 100


class Retention(NamedTuple):
    """Of one page: its priority, and for how many seconds after its last use (None = for good).

    When the time is over the page has DEFAULT_PRIORITY again, as in TensorRT-LLM.
    """

    priority: int = DEFAULT_PRIORITY
    seconds: float | None = None


@dataclass(frozen=True)
class TokenRangeRetentionConfig:
    """Priority of the pages whose first token lies in [token_start, token_end) of the prompt.

    token_end None: to the prompt's end. duration_ms None: for good; else milliseconds after the pages'
    last use.
    """

    token_start: int
    token_end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration_ms: float | None = None


@dataclass(frozen=True)
class KvCacheRetentionConfig:
    """Priorities of a request's pages in the prefix cache, 0 (first to go) to 100 (last).

    Where nothing is said a page has priority 35; of a page that is reused, the newest request that says
    something decides. Eviction takes the lowest priority first, and among equals the page used least
    recently.

    Attributes:
        token_range_retention_configs: for parts of the prompt; the first that holds a page's first
            token counts.
        decode_retention_priority, decode_duration_ms: for pages that begin in the output.

    Raises:
        UsageError: naming every invalid value at once.
    """

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: float | None = None

    #: Its name in TensorRT-LLM.
    TokenRangeRetentionConfig: ClassVar[type[TokenRangeRetentionConfig]] = TokenRangeRetentionConfig

    def __post_init__(self) -> None:
        problems: list[str] = []
        ranges: Any = self.token_range_retention_configs
        if not isinstance(ranges, (list, tuple)) or not all(
            isinstance(r, TokenRangeRetentionConfig) for r in ranges
        ):
            problems.append(
                f"token_range_retention_configs = {shown(ranges)}, expected a list of "
                "TokenRangeRetentionConfig"
            )
            ranges = ()
        object.__setattr__(self, "token_range_retention_configs", tuple(ranges))
        for i, r in enumerate(ranges):
            name = f"token_range_retention_configs[{i}]"
            if not _is_count(r.token_start):
                problems.append(f"{name}.token_start = {shown(r.token_start)}, expected an integer >= 0")
            elif r.token_end is not None and not (_is_count(r.token_end) and r.token_end > r.token_start):
                problems.append(
                    f"{name}.token_end = {shown(r.token_end)}, expected an integer above token_start "
                    f"{r.token_start}, or None for the prompt's end"
                )
            problems += _retention_problems(f"{name}.priority", r.priority, f"{name}.duration_ms", r)
        problems += _retention_problems(
            "decode_retention_priority", self.decode_retention_priority, "decode_duration_ms", self
        )
        if problems:
            raise UsageError(
                "invalid KV cache retention:\n" + "\n".join(f"  {p}" for p in problems),
                hint="for example KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 128, 80, 30_000)])",
            )

    @classmethod
    def of(cls, value: Any) -> KvCacheRetentionConfig | None:
        """A config, or one spelled as JSON data: an object with these field names; None stays None.

        Raises:
            UsageError: something else, an unknown field, or an invalid value.
        """
        if value is None or isinstance(value, cls):
            return value
        ranges = value.get("token_range_retention_configs", ()) if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(ranges, (list, tuple)):
            raise UsageError(
                f"kv_cache_retention_config = {shown(value)}, expected a KvCacheRetentionConfig or an object "
                f"with {', '.join(f.name for f in fields(cls))}"
            )
        made = [
            r if isinstance(r, TokenRangeRetentionConfig) else _made(TokenRangeRetentionConfig, r)
            for r in ranges
        ]
        config: KvCacheRetentionConfig = _made(cls, {**value, "token_range_retention_configs": made})
        return config

    def of_page(self, first_token: int, prompt_tokens: int) -> Retention | None:
        """Of the page that begins with that token; None where the config says nothing about it."""
        if first_token >= prompt_tokens:
            return Retention(self.decode_retention_priority, _seconds(self.decode_duration_ms))
        for r in self.token_range_retention_configs:
            if r.token_start <= first_token and (r.token_end is None or first_token < r.token_end):
                return Retention(r.priority, _seconds(r.duration_ms))
        return None


def _made(cls: type, value: Any) -> Any:
    known = [f.name for f in fields(cls)]
    unknown = sorted(set(value) - set(known)) if isinstance(value, Mapping) else None
    if unknown or not isinstance(value, Mapping):
        problem = shown(value) if unknown is None else f"unknown field {', '.join(map(shown, unknown))}"
        raise UsageError(f"kv_cache_retention_config: {problem}, expected an object with {', '.join(known)}")
    try:
        return cls(**value)
    except TypeError:
        raise UsageError(f"kv_cache_retention_config: {shown(dict(value))} lacks token_start") from None


def _seconds(duration_ms: float | None) -> float | None:
    return None if duration_ms is None else duration_ms / 1e3


def _retention_problems(priority_name: str, priority: Any, duration_name: str, owner: Any) -> list[str]:
    duration = getattr(owner, duration_name.rpartition(".")[2])
    problems = []
    if not _is_count(priority) or priority > MAX_PRIORITY:
        problems.append(
            f"{priority_name} = {shown(priority)}, expected an integer in [{MIN_PRIORITY}, {MAX_PRIORITY}]"
        )
    if duration is not None and (
        isinstance(duration, bool) or not isinstance(duration, int | float) or not 0 < duration < 1e15
    ):
        problems.append(f"{duration_name} = {shown(duration)}, expected milliseconds above 0, or None")
    return problems


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0
