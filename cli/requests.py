"""The requests of one `tapeout run`: from prompts, a JSON-lines file or standard input."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from tapeout.cli.run_options import DEFAULT_MAX_TOKENS
from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import SamplingParams, shown, surrogate_problem
from tapeout.runtime.scheduler.policies import MAX_PRIORITY

#: Exactly one of these says what the model reads.
PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
#: What a request says to the prefix cache.
CACHE_FIELDS = ("cache_salt", "kv_cache_retention_config")
KNOWN_FIELDS = ("id", "priority", *PROMPT_FIELDS, *CACHE_FIELDS, *SAMPLING_FIELDS)

TITLE_CHARACTERS = 60

#: Turns a request's own sampling fields into its parameters; raises UsageError.
MakeParams = Callable[[Mapping[str, Any]], SamplingParams]


@dataclass(frozen=True)
class Request:
    """What one request reads and how its tokens are chosen.

    Exactly one of `prompt`, `messages` and `prompt_token_ids` is set. `id` is the user's name for
    it, repeated in the result. Of larger `priority` is served earlier. `cache` holds its `cache_salt` and
    `kv_cache_retention_config`. `place` is the file and line it came from, for errors.
    """

    params: SamplingParams
    id: Any = None
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    priority: int = 0
    cache: Mapping[str, Any] = field(default_factory=dict)
    place: str | None = None

    def with_cache(self, cache: Mapping[str, Any]) -> Request:
        """With these things said to the prefix cache, where it says nothing else."""
        return replace(self, cache={**cache, **self.cache}) if cache else self

    def title(self) -> str:
        """One short line that tells the request from its neighbours."""
        text = self.prompt if self.prompt is not None else ""
        if self.messages is not None:
            text = str(self.messages[-1]["content"])
        line = " ".join(text.split()) or f"{len(self.prompt_token_ids or ())} token ids"
        return line if len(line) <= TITLE_CHARACTERS else line[: TITLE_CHARACTERS - 3] + "..."


@dataclass(frozen=True)
class ChatStyle:
    """Whether a plain prompt is a user's message, and which system message comes before it."""

    chat: bool = False
    system: str | None = None

    def request(self, prompt: str, params: SamplingParams, request_id: Any = None) -> Request:
        if not self.chat:
            return Request(params, request_id, prompt=prompt)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return Request(params, request_id, messages=(*system, {"role": "user", "content": prompt}))


def params_maker(generation: Mapping[str, Any], flags: Mapping[str, Any]) -> MakeParams:
    """Parameters of a request: its own fields over the flags over the model's generation config."""

    def make(own: Mapping[str, Any]) -> SamplingParams:
        values = dict(flags)
        if not generation.get("max_new_tokens"):
            values.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
        # null in a line means the same as leaving the field out.
        values |= {name: value for name, value in own.items() if value is not None}
        return SamplingParams.from_generation(generation, **values)

    return make


def requests_from_prompts(prompts: Iterable[str], style: ChatStyle, make: MakeParams) -> list[Request]:
    """One request for each prompt, all with the same parameters.

    Raises:
        UsageError: a prompt is empty, or the parameters are invalid.
    """
    params = make({})
    prompts = list(prompts)
    if empty := [str(i) for i, prompt in enumerate(prompts, 1) if not prompt]:
        raise UsageError(
            f"prompt {', '.join(empty)} is empty, expected at least one character",
            hint="give text with --prompt, or a file with --input",
        )
    return [style.request(prompt, params) for prompt in prompts]


def requests_from_jsonl(text: str, name: str, style: ChatStyle, make: MakeParams) -> list[Request]:
    """One request for each line that is not blank; `name` is how the user called the input.

    Raises:
        UsageError: naming every bad line with its number.
    """
    requests, problems = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            requests.append(replace(_from_line(line, style, make), place=f"{name}:{number}"))
        except UsageError as error:
            # A line that ends in a colon introduces those after it; here the line number does.
            parts = [part.strip() for part in error.message.splitlines() if not part.endswith(":")]
            problems += [f"{name}:{number}: {part}" for part in parts]
    if problems:
        raise UsageError(
            "\n".join(problems),
            hint=f'a line is {{"prompt": "..."}} with optional fields: {", ".join(KNOWN_FIELDS)}',
        )
    if not requests:
        raise UsageError(f"{name}: no requests, expected at least one line of JSON")
    return requests


def _from_line(line: str, style: ChatStyle, make: MakeParams) -> Request:
    data = _parsed(line)
    if not isinstance(data, dict):
        raise UsageError(f"{line.strip()[:40]!r} is no object, expected {{...}}")
    problems = [_unknown(key) for key in data if key not in KNOWN_FIELDS]
    problems += [f"{key} {problem}" for key in KNOWN_FIELDS if (problem := _unwritable(data.get(key)))]
    problems += _prompt_problems(data)
    params = None
    try:
        params = make({name: data[name] for name in SAMPLING_FIELDS if name in data})
    except UsageError as error:
        problems.append(error.message)
    priority = 0 if data.get("priority") is None else data["priority"]
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        problems.append(
            f"priority = {shown(priority)}, expected an integer from {-MAX_PRIORITY:,} to {MAX_PRIORITY:,}"
        )
    cache = {name: data[name] for name in CACHE_FIELDS if data.get(name) is not None}
    problems += _cache_problems(cache)
    if problems or params is None:
        raise UsageError("\n".join(problems))
    return replace(_request(data, style, params), priority=priority, cache=cache)


def _request(data: Mapping[str, Any], style: ChatStyle, params: SamplingParams) -> Request:
    if "prompt" in data:
        return style.request(data["prompt"], params, data.get("id"))
    if "messages" in data:
        return Request(params, data.get("id"), messages=tuple(data["messages"]))
    return Request(params, data.get("id"), prompt_token_ids=tuple(data["prompt_token_ids"]))


def _parsed(line: str) -> Any:
    """The line's JSON; UsageError for whatever the parser does not take."""
    try:
        return json.loads(line, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError:
        raise UsageError(f"not read: {line.strip()[:40]!r} nests too many lists and objects") from None
    except ValueError:  # Python's own limit, which bounds the time
        limit = sys.get_int_max_str_digits()
        raise UsageError(f"not read: it holds an integer of more than {limit} digits") from None


def _no_constant(name: str) -> NoReturn:
    raise UsageError(f"not JSON: {name} is no JSON value, expected a finite number")


def _unwritable(value: Any) -> str | None:
    """Why a value could not stand in a result, which is UTF-8 and JSON; None when it can."""
    try:
        return surrogate_problem(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError:  # 1e999 is read as infinity
        return "holds a number that is not finite"
    except RecursionError:
        return "nests too many lists and objects"


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, KNOWN_FIELDS, n=1)
    return f"unknown field {key!r}" + (f", did you mean {close[0]!r}?" if close else "")


def _prompt_problems(data: Mapping[str, Any]) -> list[str]:
    given = [name for name in PROMPT_FIELDS if name in data]
    if len(given) != 1:
        return [
            f"found {' and '.join(given) or 'no prompt'}, expected exactly one of {', '.join(PROMPT_FIELDS)}"
        ]
    value = data[given[0]]
    if given[0] == "prompt":
        ok, expected = isinstance(value, str) and value != "", "text that is not empty"
    elif given[0] == "messages":
        ok, expected = _are_messages(value), 'a list of {"role": text, "content": ...}, at least one'
    else:
        ok = isinstance(value, list) and bool(value) and all(type(i) is int and i >= 0 for i in value)
        expected = "a list of token ids, at least one"
    return [] if ok else [f"{given[0]} = {shown(value)}, expected {expected}"]


def checked_cache(cache: Mapping[str, Any]) -> Mapping[str, Any]:
    """What flags say to the prefix cache; UsageError where that is wrong."""
    if problems := _cache_problems(cache):
        raise UsageError(
            "\n".join(problems),
            hint='for example --kv-cache-retention-config \'{"token_range_retention_configs": '
            '[{"token_start": 0, "priority": 80, "duration_ms": 60000}]}\'',
        )
    return cache


def _cache_problems(cache: Mapping[str, Any]) -> list[str]:
    if not cache:
        return []
    from tapeout.runtime.intake import cache_user

    return cache_user(cache)[1]


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )
