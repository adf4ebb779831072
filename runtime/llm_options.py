"""The options of `LLM` and of its calls, checked: every bad one is named, and what was expected."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeVar

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import SamplingParams, shown
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.new_loop import SchedulerOptions
from tapeout.runtime.scheduler.policies import MAX_PRIORITY, CapacityPolicy, ChunkingPolicy

E = TypeVar("E", bound=StrEnum)


def engine_path(engine: Any) -> str:
    """The path of an engine, from whatever the user gave."""
    try:
        return os.fsdecode(engine)
    except TypeError:
        raise UsageError(
            f"engine = {shown(engine)}, expected the path of an engine file",
            hint="`tapeout build` writes one",
        ) from None


def check_options(
    limits: Limits,
    *,
    capacity_policy: Any = None,
    chunking_policy: Any = None,
    **numbers: Any,
) -> SchedulerOptions:
    """The schedulers' options within the engine's limits; None = the engine's, or the default.

    Args:
        numbers: max_batch_size, max_num_tokens, chunk_tokens; threads is checked, too.

    Raises:
        UsageError: naming every bad one.
    """
    cpus = os.cpu_count() or 1
    batch, tokens = limits.max_batch_size, limits.max_num_tokens
    ceilings = {
        # Many more threads than that and the OpenMP library ends the process.
        "threads": (cpus, f"this machine has {cpus} CPUs"),
        "max_batch_size": (batch, f"the engine was built for at most {batch}"),
        "max_num_tokens": (tokens, f"the engine was built for at most {tokens}"),
    }
    problems: list[str] = []
    for name, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{name} = {shown(value)}, expected an integer of at least 1")
        elif name in ceilings and value > ceilings[name][0]:
            problems.append(f"{name} = {shown(value)}, but {ceilings[name][1]}")
    capacity = _policy("capacity_policy", capacity_policy, CapacityPolicy.GUARANTEED_NO_EVICT, problems)
    chunking = _policy("chunking_policy", chunking_policy, ChunkingPolicy.FIRST_COME_FIRST_SERVED, problems)
    if problems:
        raise UsageError(
            "invalid options:\n" + "\n".join(f"  {p}" for p in problems),
            hint="leave one out for the engine's or machine's own; higher limits need another engine",
        )
    return SchedulerOptions(
        max_batch_size=numbers.get("max_batch_size") or batch,
        max_num_tokens=numbers.get("max_num_tokens") or tokens,
        chunk_tokens=numbers.get("chunk_tokens"),
        capacity_policy=capacity,
        chunking_policy=chunking,
    )


def _policy(name: str, value: Any, default: E, problems: list[str]) -> E:
    """A member of the default's kind, named in any case."""
    if value is None:
        return default
    kind = type(default)
    try:
        return kind(value.lower().replace("-", "_"))
    except (AttributeError, ValueError):
        names = ", ".join(member.value for member in kind)
        problems.append(f"{name} = {shown(value)}, expected one of {names}")
        return default


def check_on_step(on_step: Any) -> None:
    """Raises UsageError where it is something that cannot be called."""
    if on_step is not None and not callable(on_step):
        raise UsageError(f"on_step = {shown(on_step)}, expected a function of a StepRecord, or None")


def check_params(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Sampling parameters for each prompt, seeds included.

    Raises:
        UsageError: they are neither SamplingParams nor a list of as many.
    """
    if isinstance(params, SamplingParams):
        params = [params] * num_prompts
    if not isinstance(params, (list, tuple)):
        raise UsageError(
            f"sampling_params = {shown(params)}, expected SamplingParams or a list, one per prompt"
        )
    if len(params) != num_prompts:
        raise UsageError(f"{len(params)} sampling_params for {num_prompts} prompts, expected as many or one")
    wrong = {type(p).__name__ for p in params if not isinstance(p, SamplingParams)}
    if wrong:
        raise UsageError(f"sampling_params hold {', '.join(sorted(wrong))}, expected SamplingParams")
    return [p.with_seed() for p in params]


def check_priorities(priority: Any, num_prompts: int) -> list[int]:
    """A priority for each prompt.

    Raises:
        UsageError: it is neither an integer in the range nor a list of as many.
    """
    several = isinstance(priority, Sequence) and not isinstance(priority, (str, bytes))
    priorities = list(priority) if several else [priority] * num_prompts
    if len(priorities) != num_prompts:
        raise UsageError(f"{len(priorities)} priorities for {num_prompts} prompts, expected as many or one")
    for value in priorities:
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
            raise UsageError(
                f"priority = {shown(value)}, expected an integer from {-MAX_PRIORITY:,} to {MAX_PRIORITY:,}",
                hint="larger is served earlier; 0 is the default",
            )
    return priorities
