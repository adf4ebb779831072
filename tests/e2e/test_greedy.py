"""Greedy float32 answers of SmolLM2 are Hugging Face's, token by token, whoever shares the steps."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine import open_engine

NAMES = ("english", "code", "digits", "unicode", "french", "one token", "chat", "page", "long")
CHUNK_TOKENS = 7


@pytest.fixture(scope="module")
def greedy(reference: Any) -> SamplingParams:
    """As many tokens as Hugging Face gave."""
    return SamplingParams(temperature=0, max_tokens=reference.new_tokens, ignore_eos=True)


def differences(reference: Any, answers: Mapping[str, Sequence[int]]) -> list[str]:
    """A line for each answer that is not HF's, with what is needed to judge it."""
    lines = []
    for name, ids in answers.items():
        wanted = reference.greedy[name]
        assert len(ids) == len(wanted), name
        for i, (got, want) in enumerate(zip(ids, wanted, strict=True)):
            if got != want:
                lines.append(
                    f"{name}: token {i} is {got}, HF has {want}, HF's gap is {reference.gap(name, i):.2g}"
                )
                break
    return lines


def test_hugging_face_agrees_with_itself(reference: Any) -> None:
    """`generate` with its cache and padding chooses the maxima of one plain forward."""
    assert tuple(reference.prompts) == NAMES
    for name in NAMES:
        assert reference.logits[name].argmax(-1).tolist() == reference.greedy[name], name


@pytest.mark.parametrize("name", NAMES)
def test_alone(llm: LLM, reference: Any, greedy: SamplingParams, steps: list[Any], name: str) -> None:
    steps.clear()
    (output,) = llm.generate({"prompt_token_ids": reference.prompts[name]}, greedy)
    assert differences(reference, {name: output.outputs[0].token_ids}) == []
    assert all(len(step.plan.scheduled) == 1 for step in steps)


def test_packed_together(llm: LLM, reference: Any, greedy: SamplingParams, steps: list[Any]) -> None:
    steps.clear()
    outputs = llm.generate([{"prompt_token_ids": reference.prompts[n]} for n in NAMES], greedy)
    assert [o.prompt_token_ids for o in outputs] == [tuple(reference.prompts[n]) for n in NAMES]
    assert (
        differences(reference, {n: o.outputs[0].token_ids for n, o in zip(NAMES, outputs, strict=True)}) == []
    )
    batch = llm.engine.manifest.limits.max_batch_size
    assert len(NAMES) > batch
    assert max(len(step.plan.scheduled) for step in steps) == batch
    assert len(steps[0].plan.context) > 1


def test_joining_while_others_run(llm: LLM, reference: Any, greedy: SamplingParams, steps: list[Any]) -> None:
    """Each thread starts when the one before it has its fifth token, so every prompt meets decoding ones."""
    steps.clear()
    answers: dict[str, list[int]] = {}
    errors: list[BaseException] = []
    turn = [threading.Event() for _ in range(len(NAMES) + 1)]

    def ask(index: int, name: str) -> None:
        turn[index].wait()
        try:
            answers[name] = ids = []
            for delta in llm.stream({"prompt_token_ids": reference.prompts[name]}, greedy):
                ids += delta.outputs[0].token_ids
                if len(ids) >= 5:
                    turn[index + 1].set()
        except BaseException as error:
            errors.append(error)
        finally:
            turn[index + 1].set()

    threads = [threading.Thread(target=ask, args=(i, n)) for i, n in enumerate(NAMES)]
    for thread in threads:
        thread.start()
    turn[0].set()
    for thread in threads:
        thread.join(timeout=300)
    assert errors == []
    assert differences(reference, answers) == []
    assert set(answers) == set(NAMES)
    mixed = [s for s in steps if s.plan.context and s.plan.generation]
    assert len(mixed) >= len(NAMES) - 1


def test_in_small_chunks(smollm2: Path, reference: Any, greedy: SamplingParams) -> None:
    """Prompts cut into pieces of seven tokens, which share steps with others' decoding."""
    steps: list[Any] = []
    options: dict[str, Any] = {"chunk_tokens": CHUNK_TOKENS, "enable_prefix_reuse": False}
    with LLM(smollm2, on_step=steps.append, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": reference.prompts[n]} for n in NAMES], greedy)
    assert (
        differences(reference, {n: o.outputs[0].token_ids for n, o in zip(NAMES, outputs, strict=True)}) == []
    )
    chunks = [c.num_tokens for s in steps for c in s.plan.context]
    assert max(chunks) == CHUNK_TOKENS
    assert len(chunks) >= sum(-(-len(p) // CHUNK_TOKENS) for p in reference.prompts.values())
    assert any(s.plan.context and s.plan.generation for s in steps)


def test_the_chat_template_is_hugging_faces(llm: LLM, reference: Any) -> None:
    messages = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    prompt = llm.chat_prompt(messages)
    assert prompt["prompt_token_ids"] == reference.prompts["chat"]
    assert prompt["prompt"] == reference.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


def test_texts_become_hugging_faces_tokens(llm: LLM, reference: Any) -> None:
    text = "naïve café 😀 12345\n\tdef f(x): return x"
    (output,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=1))
    assert list(output.prompt_token_ids) == reference.tokenizer.encode(text)


def test_pages_are_as_the_prompts_assume(smollm2: Path, reference: Any) -> None:
    """The prompts named `page` and `long` end on a border of a page and one token after one."""
    with open_engine(smollm2, verify=False) as engine:
        page = engine.manifest.limits.tokens_per_page
    assert len(reference.prompts["page"]) == page
    assert len(reference.prompts["long"]) % page == 1
    assert len(reference.prompts["long"]) > 2 * page
