"""Sampling options of `tapeout run`, on a tiny model whose text is wild: half characters, no spaces."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tapeout.runtime import LLM, SamplingParams

PROMPT = "the cat sat"


@pytest.fixture
def run(invoke: Callable[..., Result], tiny_engine: Path) -> Callable[..., Result]:
    """`tapeout run ENGINE ...`, which must succeed."""

    def run(*args: str, stdin: str | None = None) -> Result:
        result = invoke("run", tiny_engine, *args, stdin=stdin)
        assert result.exit_code == 0, result.stderr
        return result

    return run


@pytest.fixture
def ask(run: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """The one JSON result for PROMPT."""

    def ask(*args: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(run("--prompt", PROMPT, "--json", *args).stdout)
        return result

    return ask


@pytest.fixture(scope="module")
def tiny(tiny_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_engine) as llm:
        yield llm


def test_several_prompts_come_in_order_under_headers(run: Callable[..., Result], tiny: LLM) -> None:
    prompts = ("the cat", "an engine", "there is")
    flags = [f for p in prompts for f in ("--prompt", p)]
    shown = run(*flags, "--max-tokens", "6").stdout
    answers = tiny.generate(list(prompts), SamplingParams(temperature=0, max_tokens=6))
    expected = [
        f"--- {i} of 3: {p} ---\n{a.outputs[0].text}\n"
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True), 1)
    ]
    assert shown == "".join(expected)


def test_standard_input_is_the_prompt(
    tapeout: Callable[..., subprocess.CompletedProcess[str]], tiny_engine: Path, tiny: LLM
) -> None:
    text = "the weights\nare written 😀"
    done = tapeout("run", tiny_engine, "--json", "--max-tokens", "5", input=text)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt"] == text
    (expected,) = tiny.generate(text, SamplingParams(temperature=0, max_tokens=5))
    assert answer["token_ids"] == list(expected.outputs[0].token_ids)


def test_a_seed_makes_sampling_repeatable(ask: Callable[..., dict[str, Any]]) -> None:
    flags = ["--temperature", "1.5", "--max-tokens", "12"]
    first, again, other = ask(*flags, "--seed", "7"), ask(*flags, "--seed", "7"), ask(*flags, "--seed", "8")
    assert (first["token_ids"], first["seed"]) == (again["token_ids"], 7)
    assert first["token_ids"] != other["token_ids"]
    fresh = ask(*flags)
    assert ask(*flags, "--seed", str(fresh["seed"]))["token_ids"] == fresh["token_ids"]


def test_a_stop_text_that_spans_tokens_is_cut_exactly(ask: Callable[..., dict[str, Any]], tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    pieces = [delta.outputs[0].text for delta in tiny.stream(PROMPT, params)]
    whole = "".join(pieces)
    clean = [(a, b) for a, b in pairwise(pieces[4:]) if a and b and (a + b).isprintable()]
    stop = clean[0][0][-1] + clean[0][1][0]
    answer = ask("--max-tokens", "48", "--ignore-eos", "--stop", "nowhere in it", "--stop", stop)
    assert answer["text"] == whole[: whole.index(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)


def test_stop_ids_end_the_answer(ask: Callable[..., dict[str, Any]]) -> None:
    ids = ask("--max-tokens", "12", "--ignore-eos")["token_ids"]
    stop = ids[5]
    answer = ask("--max-tokens", "12", "--ignore-eos", "--stop-token-ids", f"{stop},299")
    assert answer["token_ids"] == ids[: ids.index(stop) + 1]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)


def test_min_tokens_holds_back_the_end(ask: Callable[..., dict[str, Any]]) -> None:
    ids = ask("--max-tokens", "12", "--ignore-eos")["token_ids"]
    early = ["--stop-token-ids", str(ids[1]), "--max-tokens", "12"]
    assert len(ask(*early)["token_ids"]) <= 2
    assert len(ask(*early, "--min-tokens", "6")["token_ids"]) >= 6


def test_an_end_of_sequence_ends_only_when_it_may(ask: Callable[..., dict[str, Any]]) -> None:
    """At a high temperature the tiny model meets one of its two EOS ids (1 and 4) soon."""
    flags = ["--temperature", "50", "--max-tokens", "400"]
    for seed in map(str, range(5)):
        ended = ask(*flags, "--seed", seed)
        if ended["finish_reason"] == "stop":
            break
    assert ended["token_ids"][-1] in (1, 4)
    assert ended["stop_reason"] is None
    assert not {1, 4} & set(ended["token_ids"][:-1])
    went_on = ask(*flags, "--seed", seed, "--ignore-eos")
    assert went_on["token_ids"][: len(ended["token_ids"])] == ended["token_ids"]
    assert (len(went_on["token_ids"]), went_on["finish_reason"]) == (400, "length")


def test_logprobs_are_of_the_model(ask: Callable[..., dict[str, Any]], run: Callable[..., Result]) -> None:
    answer = ask("--max-tokens", "5", "--logprobs", "3")
    for token_id, row in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert len(row) == 3
        assert row[str(token_id)]["rank"] == 1
        assert all(entry["logprob"] <= row[str(token_id)]["logprob"] <= 0 for entry in row.values())
    lines = run("--prompt", PROMPT, "--max-tokens", "5", "--logprobs", "3").stdout.splitlines()
    assert len([line for line in lines if line.startswith('"')]) == 5


def test_penalties_and_filters_change_what_is_sampled(ask: Callable[..., dict[str, Any]]) -> None:
    greedy = ask("--max-tokens", "24", "--ignore-eos")["token_ids"]
    assert len(set(greedy)) < 24, "the greedy answer repeats no token, so a penalty could not be seen"
    penalized = ask(
        "--max-tokens", "24", "--ignore-eos", "--frequency-penalty", "2", "--presence-penalty", "2"
    )
    assert len(set(penalized["token_ids"])) > len(set(greedy))
    for flag in (["--top-k", "1"], ["--top-p", "0.0001"], ["--min-p", "1"]):
        filtered = ask("--max-tokens", "24", "--ignore-eos", "--temperature", "3", *flag)
        assert filtered["token_ids"] == greedy


def test_results_go_to_a_file_all_at_once(run: Callable[..., Result], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "the", "max_tokens": 2}\n{"prompt": "an", "max_tokens": 3}\n')
    run("--input", str(source), "--output", str(output))
    assert [len(json.loads(line)["token_ids"]) for line in output.read_text().splitlines()] == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
