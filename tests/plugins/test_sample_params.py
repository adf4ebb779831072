"""Sampling parameters: validation names everything wrong at once; defaults follow HF's file."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import SamplingParams, unsupported_generation_settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", 1e-300),  # 0 in float32
        ("temperature", 1e39),  # infinite in float32
        ("temperature", 10**100),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-39),
        ("repetition_penalty", 1e39),
        ("top_k", 2**31),
        ("max_tokens", 2**63),
        ("stop_token_ids", [2**31]),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 21),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "1"),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**{name: value})
    assert f"{name} = {value!r}, expected" in error.value.message
    assert error.value.exit_code == 2


@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "max_tokens", "stop_token_ids"])
@pytest.mark.parametrize("digits", [400, 5000])  # beyond every float; more than Python prints
def test_huge_integers_are_refused_like_other_values(name: str, digits: int) -> None:
    value: Any = 10**digits
    with pytest.raises(UsageError, match=f"{name} = .*, expected"):
        SamplingParams(**{name: [value] if name == "stop_token_ids" else value})


def test_extremes_that_are_allowed() -> None:
    for temperature in (0, -0.0, 1e-5, 1e5):
        SamplingParams(temperature=temperature, repetition_penalty=1e-3)
    SamplingParams(repetition_penalty=1e3, max_tokens=2**63 - 1)


def test_a_stop_string_is_unicode_text() -> None:
    with pytest.raises(UsageError, match=r"stop = .*holds '\\ud800' at character 1"):
        SamplingParams(stop=("ok", "a\ud800"))


def test_a_bad_default_is_told_to_be_the_engines() -> None:
    generation = {"do_sample": True, "temperature": -1.0, "top_p": 3, "max_new_tokens": -4}
    with pytest.raises(UsageError) as error:
        SamplingParams.from_generation(generation, top_p=2.0)
    lines = error.value.message.splitlines()[1:]
    told = {line.split()[0]: "(from the engine's generation config)" in line for line in lines}
    assert told == {"temperature": True, "max_tokens": True, "top_p": False}
    assert SamplingParams.from_generation(generation, temperature=1, top_p=1, max_tokens=1).top_p == 1


def test_all_offenders_are_named_at_once() -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(temperature=-1, top_p=2, top_k=-5, stop=[""])  # type: ignore[arg-type]
    assert error.value.message.count("expected") == 4
    with pytest.raises(UsageError, match="min_tokens = 9, expected at most max_tokens = 3"):
        SamplingParams(min_tokens=9, max_tokens=3)


def test_values_take_their_normal_form() -> None:
    params = SamplingParams(
        temperature=1,
        top_k=-1,
        stop="end",  # type: ignore[arg-type]
        stop_token_ids=[np.int64(3), 3],  # type: ignore[arg-type]
        max_tokens=np.int32(4),  # type: ignore[arg-type]
    )
    assert (params.temperature, params.top_k, params.stop) == (1.0, 0, ("end",))
    assert (params.stop_token_ids, params.max_tokens) == ((3,), 4)
    assert isinstance(params.temperature, float)
    assert params == SamplingParams(stop=("end",), stop_token_ids=(3,), max_tokens=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_a_missing_seed_is_drawn_once_and_told() -> None:
    params = SamplingParams()
    first, second = params.with_seed(), params.with_seed()
    assert first.seed is not None
    assert first.seed != second.seed
    assert first.with_seed() is first
    assert SamplingParams(temperature=0).with_seed().seed is None


def test_defaults_follow_the_generation_config() -> None:
    file = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 64}
    assert SamplingParams.from_generation(file) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, max_tokens=64
    )
    assert SamplingParams.from_generation({}).greedy
    assert SamplingParams.from_generation({"do_sample": False, "temperature": 0.6}).greedy
    assert not SamplingParams.from_generation({"do_sample": False}, temperature=0.6).greedy
    assert SamplingParams.from_generation(file, top_k=None, top_p=0.5).top_k == 20
    assert SamplingParams.from_generation(file, top_p=0.5).top_p == 0.5
    assert SamplingParams.from_generation({"min_new_tokens": 30}, max_tokens=5).min_tokens == 5
    assert SamplingParams.from_generation({"repetition_penalty": 1.3}).repetition_penalty == 1.3


def test_an_unknown_override_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"temprature \(did you mean temperature\?\)"):
        SamplingParams.from_generation({}, temprature=1.0)


def test_unsupported_generation_settings_are_those_that_would_change_tokens() -> None:
    generation = {"no_repeat_ngram_size": 3, "num_beams": 1, "typical_p": 1.0, "top_k": 5, "use_cache": True}
    assert unsupported_generation_settings(generation) == ["no_repeat_ngram_size=3"]
