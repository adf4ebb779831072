"""The many options of `tapeout run`, by what they are for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from tapeout.plugins.sample.params import SamplingParams, surrogate_problem
from tapeout.runtime.scheduler.policies import CapacityPolicy, ChunkingPolicy

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[Any], Any]

#: Flags named like these go into SamplingParams or into LLM.
SAMPLING_NAMES = frozenset(field.name for field in fields(SamplingParams))
RUNTIME_NAMES = frozenset(
    (
        "kv_cache_bytes",
        "max_tokens_in_kv_cache",
        "free_memory_fraction",
        "chunk_tokens",
        "capacity_policy",
        "chunking_policy",
        "max_batch_size",
        "max_num_tokens",
        "threads",
        "strict_sku",
    )
)

PREFIX_CACHE_NAMES = frozenset(("enable_prefix_reuse", "host_cache_bytes"))
#: What requests say to the prefix cache that do not say it themselves.
REQUEST_CACHE_NAMES = frozenset(("cache_salt", "kv_cache_retention_config"))

#: SamplingParams' own default of 16 would cut nearly every answer asked for at a terminal.
DEFAULT_MAX_TOKENS = 256


def apply(options: tuple[Option, ...]) -> Callable[[F], F]:
    """A decorator that adds options in the order given."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _json_object(context: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        data = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{value[:40]!r} is not JSON: {error}", context, param) from None
    if not isinstance(data, dict):
        raise click.BadParameter(f"{value[:40]!r} is no JSON object, expected {{...}}", context, param)
    return data


def _token_ids(context: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    """`--stop-token-ids 1,2 --stop-token-ids 3` gives (1, 2, 3)."""
    parts = [part.strip() for value in values for part in value.split(",")]
    # 10 digits hold every id; Python refuses to read more than some thousand.
    if bad := [part for part in parts if not (part.isdecimal() and len(part) <= 10)]:
        raise click.BadParameter(f"{', '.join(map(repr, bad))}, expected ids such as 1,2", context, param)
    return tuple(map(int, parts))


class Text(click.types.StringParamType):
    """Text for the model: UTF-8 whatever the locale says, and nothing that is none."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        try:
            # Python keeps bytes that the locale's encoding lacks as lone surrogates.
            return os.fsencode(text).decode() if surrogate_problem(text) else text
        except UnicodeError:
            self.fail(f"{text[:60]!r} is not UTF-8 text.", param, ctx)


TEXT = Text()


def _number(name: str, kind: type, text: str) -> Option:
    return click.option(name, type=kind, help=text)


#: Fields of SamplingParams by their own names; what is not given comes from the model.
SAMPLING = (
    _number("--max-tokens", int, f"Most tokens to generate. [default: the model's, or {DEFAULT_MAX_TOKENS}]"),
    _number("--min-tokens", int, "Do not end before this many tokens."),
    _number("--temperature", float, "0 takes the most likely token."),
    _number("--top-k", int, "Sample from the K most likely tokens; 0 is off."),
    _number("--top-p", float, "Sample from the smallest set with this probability; 1 is off."),
    _number("--min-p", float, "Drop tokens below this share of the most likely one's; 0 is off."),
    _number("--repetition-penalty", float, "Above 1 discourages tokens already there; 1 is off."),
    _number("--presence-penalty", float, "Subtracted once from tokens of the output."),
    _number("--frequency-penalty", float, "Subtracted for each time a token was generated."),
    _number("--seed", int, "Makes sampling repeatable."),
    click.option(
        "--stop", type=TEXT, multiple=True, metavar="TEXT", help="End before this text. Repeatable."
    ),
    click.option(
        "--stop-token-ids",
        multiple=True,
        callback=_token_ids,
        metavar="IDS",
        help="End after one of these, for example 1,2. Repeatable.",
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-sequence token."),
    _number("--logprobs", int, "Also give this many most likely tokens at each position."),
)

#: The policies' own values; any case will do, and dashes.
CAPACITY_POLICIES = click.Choice([policy.value for policy in CapacityPolicy], case_sensitive=False)
CHUNKING_POLICIES = click.Choice([policy.value for policy in ChunkingPolicy], case_sensitive=False)

#: Limits of the engine that a run may lower.
LIMITS = (
    _number("--max-batch-size", int, "Most requests in flight, at most the engine's."),
    _number("--max-num-tokens", int, "Most tokens in one step, at most the engine's."),
)

#: Arguments of LLM by their own names.
RUNTIME = (
    _number("--kv-cache-bytes", int, "Most bytes of the KV cache."),
    click.option("--kv-cache-tokens", "max_tokens_in_kv_cache", type=int, help="The same in tokens."),
    _number("--free-memory-fraction", float, "Most of the free memory the KV cache may take."),
    _number("--chunk-tokens", int, "Most prompt tokens of one request in a step."),
    click.option(
        "--capacity-policy",
        type=CAPACITY_POLICIES,
        help="When a waiting request may hold pages. [default: guaranteed_no_evict]",
    ),
    click.option(
        "--chunking-policy",
        type=CHUNKING_POLICIES,
        help="How prompts share a step. [default: first_come_first_served]",
    ),
    *LIMITS,
    _number("--threads", int, "CPU threads."),
    click.option(
        "--strict-sku",
        is_flag=True,
        default=None,
        help="Refuse a GPU of another model than the engine's, or a later CPU level; otherwise a warning.",
    ),
)

#: The same, about the prefix cache; `bench` has no use for it, because it computes every prompt.
PREFIX_CACHE = (
    click.option(
        "--no-prefix-reuse",
        "enable_prefix_reuse",
        flag_value=False,
        type=bool,
        default=None,
        help="Compute every prompt as a whole, also what an earlier one began with.",
    ),
    _number("--host-cache-bytes", int, "Host memory for cached pages that leave the device. [default: 0]"),
)

#: What the requests of a run say to the prefix cache; a line of --input may say something else.
REQUEST_CACHE = (
    click.option(
        "--cache-salt",
        type=TEXT,
        metavar="TEXT",
        help="Share cached pages only with requests that have the same salt.",
    ),
    click.option(
        "--kv-cache-retention-config",
        callback=_json_object,
        metavar="JSON",
        help="How long pages of the requests are worth keeping; see docs/prefix_reuse.md.",
    ),
)
