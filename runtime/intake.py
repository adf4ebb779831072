"""The door: prompts in any accepted form, checked, or refused with every offender named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import SamplingParams, shown, surrogate_problem
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.kv_cache import CacheUser, KvCacheRetentionConfig, pages_for
from tapeout.runtime.tokenizer import Tokenizer

#: A text, token ids, or {"prompt": text} / {"prompt_token_ids": ids, "prompt": text for display}; with
#: "cache_salt" and "kv_cache_retention_config" of the request, if it has them.
Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]
_PROMPT_KEYS = {"prompt", "prompt_token_ids"}
_CACHE_KEYS = {"cache_salt", "kv_cache_retention_config"}
_SHOWN_OFFENDERS = 20


@dataclass(frozen=True)
class CheckedRequest:
    """A request that can run. `max_tokens` is bounded by what engine and pool can hold."""

    prompt: str | None
    prompt_token_ids: np.ndarray
    params: SamplingParams
    max_tokens: int
    cache_user: CacheUser


@dataclass(frozen=True)
class Intake:
    """What requests are checked against. `num_pages` is the KV pool's size."""

    limits: Limits
    vocab_size: int
    num_pages: int
    tokenizer: Tokenizer | None

    def check(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> tuple[CheckedRequest, ...]:
        """Check a batch before any of it runs.

        Raises:
            UsageError: some can never run; all of them are named with their numbers.
        """
        checked: list[CheckedRequest] = []
        problems: list[str] = []
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                checked.append(self._check_one(prompt, p))
            except _Refused as refused:
                problems += [f"prompt {i}: {reason}" for reason in refused.reasons]
        if problems:
            more = len(problems) - _SHOWN_OFFENDERS
            tail = [f"  and {more} more"] if more > 0 else []
            raise UsageError(
                "\n".join(["requests refused:", *(f"  {p}" for p in problems[:_SHOWN_OFFENDERS]), *tail]),
                hint="nothing was run; correct or leave out these prompts",
            )
        return tuple(checked)

    def _check_one(self, prompt: Prompt, params: SamplingParams) -> CheckedRequest:
        text, ids = self._ids_of(prompt)
        user, reasons = cache_user(prompt) if isinstance(prompt, Mapping) else (CacheUser(), [])
        if not ids:
            reasons.append("it is empty, expected at least one token")
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bad = [i for i in ids if not 0 <= i < self.vocab_size]
            some = ", ".join(map(shown, bad[:5])) + (", ..." if len(bad) > 5 else "")
            reasons.append(f"token ids {some} are outside the vocabulary, expected [0, {self.vocab_size})")
        max_tokens = self._bound_max_tokens(len(ids), params, reasons)
        if max_tokens is not None and params.min_tokens > max_tokens:
            reasons.append(f"min_tokens = {params.min_tokens}, but only {max_tokens} tokens can be generated")
        bad_stops = [i for i in params.stop_token_ids if i >= self.vocab_size]
        if bad_stops:
            reasons.append(f"stop_token_ids {bad_stops} are outside the vocabulary of {self.vocab_size}")
        if params.stop and self.tokenizer is None:
            reasons.append(f"stop = {params.stop!r}, but the engine has no tokenizer; use stop_token_ids")
        if reasons or max_tokens is None:
            raise _Refused(reasons)
        return CheckedRequest(text, np.array(ids, dtype=np.int32), params, max_tokens, user)

    def _ids_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = sorted(map(shown, set(prompt) - _PROMPT_KEYS - _CACHE_KEYS))
            if unknown or not _PROMPT_KEYS & set(prompt):
                keys = ", ".join(unknown or map(shown, prompt))
                raise _Refused([f"keys [{keys}], expected 'prompt' or 'prompt_token_ids'"])
            text = prompt.get("prompt")
            if not isinstance(text, str) and not (text is None and "prompt_token_ids" in prompt):
                raise _Refused([f"'prompt' = {shown(text)}, expected a string"])
            if text is None or "prompt_token_ids" in prompt:
                return text, _as_ids(prompt["prompt_token_ids"])
            prompt = text
        if not isinstance(prompt, str):
            return None, _as_ids(prompt)
        if not prompt:
            raise _Refused(["it is empty, expected some text"])
        if self.tokenizer is None:
            raise _Refused(["it is text, but the engine has no tokenizer; pass token ids"])
        try:
            return prompt, self.tokenizer.encode(prompt)
        except UsageError as error:
            raise _Refused([error.message]) from None

    def _bound_max_tokens(self, prompt_tokens: int, params: SamplingParams, reasons: list[str]) -> int | None:
        """Tokens that may be generated; None, with a reason added, when the prompt leaves no room."""
        room = self.limits.max_seq_len - prompt_tokens
        if room < 1:
            reasons.append(
                f"it has {prompt_tokens} tokens; max_seq_len = {self.limits.max_seq_len} allows at most "
                f"{self.limits.max_seq_len - 1} and one to generate"
            )
            return None
        per_page = self.limits.tokens_per_page
        if params.max_tokens is None:
            # "As many as fit": the pool bounds it as the engine's limit does.
            wanted = max(min(room, self.num_pages * per_page - prompt_tokens), 1)
        else:
            wanted = min(params.max_tokens, room)
        pages = pages_for(prompt_tokens + wanted, per_page)
        if pages > self.num_pages:
            reasons.append(
                f"{prompt_tokens} prompt tokens and {wanted} to generate need {pages} KV pages of {per_page} "
                f"tokens; the pool has {self.num_pages}"
            )
            return None
        return wanted


class _Refused(Exception):
    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons


def cache_user(fields: Mapping[str, Any]) -> tuple[CacheUser, list[str]]:
    """Salt and retention from an object with `cache_salt` and `kv_cache_retention_config`, and what is
    wrong with them."""
    problems, salt = [], fields.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt or surrogate_problem(salt)):
        problems.append(f"cache_salt = {shown(salt)}, expected text that is not empty, or None")
    retention = None
    try:
        retention = KvCacheRetentionConfig.of(fields.get("kv_cache_retention_config"))
    except UsageError as error:
        problems += [line.strip() for line in error.message.split("\n") if not line.endswith(":")]
    return CacheUser(salt=salt, retention=retention), problems


def _as_ids(value: Any) -> list[int]:
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise _Refused([f"token ids are {value.dtype}{list(value.shape)}, expected a row of integers"])
        ids: list[int] = value.tolist()
        return ids
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise _Refused([f"it is a {type(value).__name__}, expected a string or a list of token ids"])
    if set(map(type, value)) <= {int}:  # nearly always; asking every number for its kind takes longer
        return list(value)
    wrong = [v for v in value if isinstance(v, bool) or not isinstance(v, Integral)]
    if wrong:
        raise _Refused([f"token ids hold {shown(wrong[0])}, expected integers"])
    return [int(v) for v in value]


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt in any form, or a list of them, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.ndim > 0:
        return [prompts.tolist()] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray, memoryview)):
        raise UsageError(
            f"prompts = {shown(prompts)}, a {type(prompts).__name__}, expected a prompt or a list of prompts",
            hint="a prompt is a string, a list of token ids, or {'prompt_token_ids': [...]}",
        )
    if prompts and all(isinstance(p, Integral) for p in prompts):
        return [prompts]
    return list(prompts)


def with_cache_options(
    prompts: list[Prompt], salt: str | None, retention: KvCacheRetentionConfig | None
) -> list[Prompt]:
    """Prompts that say these for themselves; what one says already stays."""
    given = {"cache_salt": salt, "kv_cache_retention_config": retention}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return prompts

    def own(prompt: Prompt) -> Prompt:
        if isinstance(prompt, Mapping):
            return {**given, **prompt}
        return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, **given}

    return [own(prompt) for prompt in prompts]
