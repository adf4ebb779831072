"""Sampling parameters of a request."""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from tapeout.plugins.errors import UsageError

MAX_LOGPROBS = 20
_SEED_LIMIT = 2**64
_COUNT_LIMIT = 2**63
_ID_LIMIT = 2**31  # ids and top_k are int32 on a device

# Kernels compute in float32. Beyond these, a scaled logit is no longer a number there, while within
# them they already mean "the most likely id only", "uniform", or "never again".
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-5, 1e5
_LEAST_PENALTY, _MOST_PENALTY = 1e-3, 1e3
_SHOWN_CHARACTERS = 120

# HF generation-config keys that change which tokens come out and that we do not apply, with the
# values at which they do nothing. Others (cache, output and assistant settings) do not matter here.
_UNSUPPORTED_GENERATION_KEYS: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "bad_words_ids": (),
    "suppress_tokens": ([], ()),
    "begin_suppress_tokens": ([], ()),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": (),
    "watermarking_config": (),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens of one request are chosen. Names and meaning as in vLLM and TensorRT-LLM.

    Processors run in this fixed order: repetition, frequency and presence penalty, the
    `min_tokens` mask, temperature, top-k, top-p, min-p, one draw.

    Attributes:
        max_tokens: most tokens to generate; None = as many as the engine's limits allow.
        min_tokens: EOS, stop ids and stop strings have no effect before this many tokens.
        temperature: 0 = greedy (the lowest id among the maxima), else in [1e-5, 1e5].
        top_k: keep ids whose logit is at least the k-th largest; 0 or -1 = off.
        top_p: keep an id while the ids above it hold less than this probability; 1 = off.
        min_p: keep ids with at least this share of the largest probability; 0 = off.
        repetition_penalty: > 1 discourages ids of the prompt and the output; 1 = off; in [1e-3, 1e3].
        presence_penalty: subtracted once for an id in the output, in [-2, 2].
        frequency_penalty: subtracted per occurrence in the output, in [-2, 2].
        seed: fixes the draws; None = a fresh one for each request, told in the result.
        stop: strings that end the output (one string is accepted).
        stop_token_ids: ids that end the output, beside the model's EOS ids.
        include_stop_str_in_output: keep the stop string (or stop id's text) in the text.
        ignore_eos: EOS ids do not end the output.
        logprobs: report this many top log probabilities per token and the sampled one's, of the
            model's distribution before any processor; None = no, 0 = the sampled one only.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        UsageError: naming every invalid value at once.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        checks = _Checks(self)
        checks.integer("max_tokens", "in [1, 2**63), or None", lambda v: 1 <= v < _COUNT_LIMIT, optional=True)
        checks.integer("min_tokens", "in [0, 2**63)", lambda v: 0 <= v < _COUNT_LIMIT)
        checks.number(
            "temperature",
            f"0 (greedy) or a number in [{_LEAST_TEMPERATURE:g}, {_MOST_TEMPERATURE:g}]",
            lambda v: v == 0 or _LEAST_TEMPERATURE <= v <= _MOST_TEMPERATURE,
        )
        checks.integer("top_k", "in [1, 2**31), or 0 / -1 for off", lambda v: -1 <= v < _ID_LIMIT)
        checks.number("top_p", "in (0, 1]", lambda v: 0 < v <= 1)
        checks.number("min_p", "in [0, 1]", lambda v: 0 <= v <= 1)
        checks.number(
            "repetition_penalty",
            f"a number in [{_LEAST_PENALTY:g}, {_MOST_PENALTY:g}]",
            lambda v: _LEAST_PENALTY <= v <= _MOST_PENALTY,
        )
        checks.number("presence_penalty", "in [-2, 2]", lambda v: -2 <= v <= 2)
        checks.number("frequency_penalty", "in [-2, 2]", lambda v: -2 <= v <= 2)
        checks.integer("seed", "in [0, 2**64), or None", lambda v: 0 <= v < _SEED_LIMIT, optional=True)
        checks.integer(
            "logprobs", f"in [0, {MAX_LOGPROBS}], or None", lambda v: 0 <= v <= MAX_LOGPROBS, optional=True
        )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            checks.flag(name)
        checks.stop_strings()
        checks.stop_ids()
        checks.min_not_above_max()
        if checks.problems:
            raise UsageError(
                "invalid sampling parameters:\n" + "\n".join(f"  {p}" for p in checks.problems),
                hint="see the docstring of tapeout.runtime.SamplingParams for meaning and range",
            )
        for name, value in checks.normal.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True when the most likely id is taken instead of a draw."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True when the choice depends on the ids seen before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def with_seed(self) -> SamplingParams:
        """These parameters with a seed: a fresh random one when there is none and draws happen."""
        return self if self.seed is not None or self.greedy else replace(self, seed=secrets.randbits(63))

    @classmethod
    def from_generation(cls, generation: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """Defaults of a model's generation config, replaced by `overrides` that are not None.

        HF semantics: without `do_sample: true` the default is greedy. A temperature given as an
        override samples, with the file's top-k, top-p and min-p. Only what the file states is taken
        (HF's own library default of top_k=50 is not). `max_new_tokens` and `min_new_tokens` become
        max_tokens and min_tokens. `unsupported_generation_settings` names what is left out.

        Raises:
            UsageError: unknown override, or a value out of range.
        """
        known = {f.name for f in fields(cls)}
        unknown = [_nearest(name, known) for name in overrides if name not in known]
        if unknown:
            raise UsageError(
                "unknown sampling parameters:\n" + "\n".join(f"  {name}" for name in unknown),
                hint=f"known ones: {', '.join(sorted(known))}",
            )
        values = {
            ours: generation[theirs]
            for theirs, ours in _GENERATION_KEYS.items()
            if generation.get(theirs) is not None
        }
        if not generation.get("do_sample"):
            values["temperature"] = 0.0
        given = {name: value for name, value in overrides.items() if value is not None}
        values |= given
        if "min_tokens" not in given:
            _lower_model_minimum(values)
        try:
            return cls(**values)
        except UsageError as error:
            message = _with_origin(error.message, values.keys() - given.keys())
            if message == error.message:
                raise
            raise UsageError(
                message, hint="give values of your own, or build the engine from a corrected checkpoint"
            ) from None


_GENERATION_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}


def _lower_model_minimum(values: dict[str, Any]) -> None:
    """The model's own minimum must not make a smaller maximum, the caller's above all, invalid."""
    low: Any = values.get("min_tokens")
    high: Any = values.get("max_tokens", SamplingParams.max_tokens)
    if _is_integer(low) and _is_integer(high) and low > high > 0:
        values["min_tokens"] = high


def _with_origin(message: str, names: Iterable[str]) -> str:
    """The problems of `message` with a note on those about a value of the generation config."""
    ours = tuple(f"  {name} = " for name in names)
    note = " (from the engine's generation config)"
    return "\n".join(line + note if line.startswith(ours) else line for line in message.split("\n"))


def unsupported_generation_settings(generation: Mapping[str, Any]) -> list[str]:
    """`key=value` for each setting of a generation config that would change tokens and is not applied."""
    return [
        f"{key}={generation[key]!r}"
        for key, neutral in _UNSUPPORTED_GENERATION_KEYS.items()
        if generation.get(key) is not None and generation[key] not in neutral
    ]


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"{name} (did you mean {close[0]}?)" if close else name


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """`repr` for a message: shortened, and never failing as that of an integer of 5000 digits does."""
    try:
        text = repr(value)
    except ValueError:
        text = f"<{type(value).__name__} too long to print>"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def surrogate_problem(text: str) -> str | None:
    """What keeps a string from being Unicode text (JSON and arguments can hold such); None when it is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds {text[error.start]!r} at character {error.start}, which is no Unicode text"
    return None


class _Checks:
    """Collects problems and normal forms of one SamplingParams."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.problems: list[str] = []
        self.normal: dict[str, Any] = {}

    def _expected(self, name: str, expected: str) -> None:
        self.problems.append(f"{name} = {shown(getattr(self.params, name))}, expected {expected}")

    def integer(self, name: str, expected: str, valid: Callable[[int], bool], optional: bool = False) -> None:
        value = getattr(self.params, name)
        if value is None and optional:
            return
        if not _is_integer(value) or not valid(int(value)):
            self._expected(name, f"an integer {expected}")
        else:
            self.normal[name] = 0 if name == "top_k" and value == -1 else int(value)

    def number(self, name: str, expected: str, valid: Callable[[float], bool]) -> None:
        value = getattr(self.params, name)
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        except OverflowError:  # an integer beyond every float
            number = math.inf
        if not (math.isfinite(number) and valid(number)):
            self._expected(name, expected)
        else:
            self.normal[name] = number

    def flag(self, name: str) -> None:
        if not isinstance(getattr(self.params, name), bool):
            self._expected(name, "True or False")

    def stop_strings(self) -> None:
        value: Any = self.params.stop
        strings = (value,) if isinstance(value, str) else () if value is None else value
        if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
            self._expected("stop", "a non-empty string or a list of them")
        elif reason := next(filter(None, map(surrogate_problem, strings)), None):
            self._expected("stop", f"Unicode text, but it {reason}")
        else:
            self.normal["stop"] = tuple(dict.fromkeys(strings))

    def stop_ids(self) -> None:
        value: Any = self.params.stop_token_ids
        ids = () if value is None else value
        if not isinstance(ids, (list, tuple)) or not all(_is_integer(i) and 0 <= i < _ID_LIMIT for i in ids):
            self._expected("stop_token_ids", "a list of token ids in [0, 2**31)")
        else:
            self.normal["stop_token_ids"] = tuple(dict.fromkeys(int(i) for i in ids))

    def min_not_above_max(self) -> None:
        low, high = self.normal.get("min_tokens"), self.normal.get("max_tokens")
        if low is not None and high is not None and low > high:
            self.problems.append(f"min_tokens = {low}, expected at most max_tokens = {high}")
