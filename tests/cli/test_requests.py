"""Requests from prompts and JSON lines; every bad line is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.cli.requests import ChatStyle, Request, requests_from_jsonl, requests_from_prompts
from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import SamplingParams

PLAIN = ChatStyle()


def make(overrides: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, **overrides})


def read(*lines: Any, style: ChatStyle = PLAIN) -> list[Request]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return requests_from_jsonl(text, "in.jsonl", style, make)


def test_the_three_kinds_of_prompt() -> None:
    messages = [{"role": "user", "content": "hi"}]
    text, chat, ids = read(
        {"prompt": "a"}, {"messages": messages, "id": 7}, {"prompt_token_ids": [1, 2], "id": "x"}
    )
    assert (text.prompt, text.messages, text.prompt_token_ids, text.id) == ("a", None, None, None)
    assert (chat.prompt, chat.messages, chat.id) == (None, tuple(messages), 7)
    assert (ids.prompt_token_ids, ids.id) == ((1, 2), "x")


def test_a_line_sets_its_own_sampling() -> None:
    first, second = read({"prompt": "a", "max_tokens": 3, "stop": ["x"], "seed": 1}, "", {"prompt": "b"})
    assert first.params == SamplingParams(temperature=0.0, max_tokens=3, stop=("x",), seed=1)
    assert second.params == SamplingParams(temperature=0.0)


def test_all_bad_lines_are_named_with_their_numbers() -> None:
    with pytest.raises(UsageError) as caught:
        read(
            {"prompt": "fine"},
            "{not json",
            [1],
            {"prompt": "a", "max_token": 3},
            "",
            {"text": "a"},
            {"prompt": "a", "messages": []},
            {"prompt": ""},
            {"prompt": "a", "temperature": -1, "top_p": 2},
            {"prompt_token_ids": [1, True]},
            {"messages": [{"role": "user"}]},
        )
    lines = caught.value.message.splitlines()
    assert {line.split(":")[1] for line in lines} == {"2", "3", "4", "6", "7", "8", "9", "10", "11"}
    text = caught.value.message
    assert len(lines) == 11
    assert "in.jsonl:2: not JSON" in text
    assert "in.jsonl:4: unknown field 'max_token', did you mean 'max_tokens'?" in text
    assert "in.jsonl:6: unknown field 'text'" in text
    assert "in.jsonl:6: found no prompt, expected exactly one of" in text
    assert "in.jsonl:7: found prompt and messages" in text
    assert "in.jsonl:9: temperature = -1" in text
    assert "in.jsonl:9: top_p = 2" in text


def test_lines_that_no_result_could_repeat_are_named_with_the_others() -> None:
    deep = "[" * 100_000
    with pytest.raises(UsageError) as caught:
        read(
            '{"prompt": "\\ud800"}',
            '{"messages": [{"role": "user", "content": "a\\udfffb"}]}',
            '{"prompt": "a", "id": "\\ud800"}',
            '{"prompt": "a", "id": NaN}',
            '{"prompt": "a", "id": {"x": [1e999]}}',
            '{"prompt": "a", "seed": ' + "9" * 5000 + "}",
            deep,
            '{"prompt": "a", "temperature": 1' + "0" * 400 + "}",
            '{"prompt": "a", "stop": ["\\ud800"]}',
            '{"\\ud800": 1, "prompt": "a"}',
            '{"prompt": "\\ud83d\\ude00", "id": "a pair is a character"}',
            "{not json",
        )
    text = caught.value.message
    assert sorted({int(line.split(":")[1]) for line in text.splitlines()}) == [*range(1, 11), 12]
    assert "in.jsonl:1: prompt holds '\\ud800'" in text
    assert "in.jsonl:4: not JSON: NaN" in text
    assert "in.jsonl:5: id holds a number that is not finite" in text
    assert "in.jsonl:6: not read: it holds an integer of more than 4300 digits" in text
    assert "in.jsonl:7: not read: " in text
    assert "in.jsonl:8: temperature = 1000" in text
    text.encode()  # can be printed


def test_an_input_without_requests_is_an_error() -> None:
    with pytest.raises(UsageError, match="no requests"):
        read("", "  ")


def test_chat_style_wraps_plain_prompts_only() -> None:
    style = ChatStyle(chat=True, system="be brief")
    wrapped, given_messages = read(
        {"prompt": "hi"}, {"messages": [{"role": "user", "content": "x"}]}, style=style
    )
    assert wrapped.prompt is None
    assert wrapped.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    )
    assert given_messages.messages == ({"role": "user", "content": "x"},)


def test_empty_prompts_are_named() -> None:
    with pytest.raises(UsageError, match="prompt 2, 3 is empty"):
        requests_from_prompts(["a", "", ""], ChatStyle(), make)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1))
def test_any_text_survives_a_line(prompts: list[str]) -> None:
    """U+2028 and the like end a line for str.splitlines, never for JSON lines."""
    lines = "\n".join(json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts)
    assert [r.prompt for r in requests_from_jsonl(lines, "x", ChatStyle(), make)] == prompts
