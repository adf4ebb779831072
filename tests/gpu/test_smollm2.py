"""SmolLM2-135M-Instruct, its weight files made here from the GGUF file: Hugging Face's greedy ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu_bfloat16 import first_differences, near_ties
from gpu_bundle import DTYPES, NEW_TOKENS, Bundle
from gpu_cases import kind_of, stream_joining

from tapeout.runtime import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
CHUNK_TOKENS = 7


@pytest.fixture(scope="module")
def hf(bundle: Bundle) -> dict[str, Any]:
    """By name: prompt, greedy ids, and at each of them HF's gap and what its bfloat16 differs."""
    found = bundle.json("smollm2_hf.json")
    assert len(found) == 9
    return dict(found)


@pytest.fixture(scope="module")
def weights(
    bundle: Bundle, smollm2_gguf: Path, tapeout: Callable[..., Any], report: Callable[[str], None]
) -> None:
    """The weight files of both engines."""
    for dtype in DTYPES:
        done = tapeout("weights", bundle.path(f"smollm2_{dtype}.engine"), smollm2_gguf)
        assert done.returncode == 0, done.stderr
        report(done.stdout.strip())


@pytest.fixture
def ask(weights: None, engines: Any, hf: dict[str, Any]) -> Callable[..., tuple[dict[str, Any], list[Any]]]:
    """Runs all prompts in one call; returns ids by name, and the steps."""

    def run(dtype: str, **options: Any) -> tuple[dict[str, Any], list[Any]]:
        llm, steps = engines.llm(f"smollm2_{dtype}.engine", **options)
        outputs = llm.generate([{"prompt_token_ids": want["prompt"]} for want in hf.values()], GREEDY)
        return {n: o.outputs[0].token_ids for n, o in zip(hf, outputs, strict=True)}, steps

    return run


def described(hf: Mapping[str, Any], answers: Mapping[str, Sequence[int]]) -> list[str]:
    """A line for each difference in float32, with what is needed to judge it."""
    return [
        f"{name}: token {i} is {answers[name][i]}, HF has {hf[name]['greedy'][i]}, "
        f"HF's gap is {hf[name]['gaps'][i]:.2g}"
        for name, i in first_differences(hf, answers).items()
    ]


def test_alone(weights: None, engines: Any, hf: dict[str, Any]) -> None:
    llm, steps = engines.llm("smollm2_float32.engine")
    answers = {
        name: llm.generate({"prompt_token_ids": want["prompt"]}, GREEDY)[0].outputs[0].token_ids
        for name, want in hf.items()
    }
    assert described(hf, answers) == []
    assert all(step.plan.num_sequences == 1 for step in steps)


def test_packed_together(ask: Any, hf: dict[str, Any]) -> None:
    answers, steps = ask("float32")
    assert described(hf, answers) == []
    assert max(step.plan.num_sequences for step in steps) == 8
    assert len(steps[0].plan.context) > 1


@pytest.mark.parametrize("options", [{"chunk_tokens": CHUNK_TOKENS}, {"max_num_tokens": 16}], ids=str)
def test_in_small_pieces(ask: Any, hf: dict[str, Any], options: dict[str, int]) -> None:
    answers, steps = ask("float32", **options)
    assert described(hf, answers) == []
    pieces = [c.num_tokens for s in steps for c in s.plan.context]
    assert max(pieces) <= max(options.values())
    assert "mixed" in {kind_of(step) for step in steps}


def test_joining_while_others_run(weights: None, engines: Any, hf: dict[str, Any]) -> None:
    llm, steps = engines.llm("smollm2_float32.engine")
    answers = stream_joining(llm, [want["prompt"] for want in hf.values()], [GREEDY] * len(hf))
    assert described(hf, dict(zip(hf, answers, strict=True))) == []
    assert sum(kind_of(step) == "mixed" for step in steps) >= len(hf) - 1


def test_sampled_ids_are_the_cpu_engines(
    weights: None, engines: Any, bundle: Bundle, hf: dict[str, Any]
) -> None:
    wanted = bundle.json("smollm2_cpu.json")
    llm, _ = engines.llm("smollm2_float32.engine")
    outputs = llm.generate(
        [{"prompt_token_ids": hf[name]["prompt"]} for name in wanted],
        [SamplingParams(**want["params"]) for want in wanted.values()],
    )
    for (name, want), output in zip(wanted.items(), outputs, strict=True):
        assert list(output.outputs[0].token_ids) == want["ids"], name


def test_bf16_diverges_only_at_near_ties(ask: Any, hf: dict[str, Any], report: Callable[[str], None]) -> None:
    answers, _ = ask("bfloat16")
    lines, unexplained = near_ties(hf, answers)
    for line in lines:
        report(f"bfloat16, {line}")
    assert unexplained == []


def test_bf16_answers_the_question(weights: None, engines: Any) -> None:
    llm, _ = engines.llm("smollm2_bfloat16.engine")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.generate(llm.chat_prompt(question), SamplingParams(temperature=0, max_tokens=32))
    assert "Paris" in output.outputs[0].text


def test_the_weight_file_is_kept(
    weights: None, bundle: Bundle, smollm2_gguf: Path, tapeout: Callable[..., Any]
) -> None:
    done = tapeout("weights", bundle.path("smollm2_bfloat16.engine"), smollm2_gguf)
    assert done.returncode == 0, done.stderr
    assert "was there already" in done.stdout
    shown = tapeout("inspect", bundle.path("smollm2_bfloat16.engine"), "--json")
    assert json.loads(shown.stdout)
