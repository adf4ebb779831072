"""Tiny float32 models of several architectures: the CPU engine's ids, whatever shares the steps."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_bundle import TINY, Bundle
from gpu_cases import CASE_BY_NAME, from_json, kind_of, run_case


@pytest.mark.parametrize("case_name", CASE_BY_NAME)
@pytest.mark.parametrize("model", TINY)
def test_ids_are_the_cpu_engines(bundle: Bundle, engines: Any, model: str, case_name: str) -> None:
    case = CASE_BY_NAME[case_name]
    wanted = from_json(bundle.json(f"{model}.json")[case_name])
    llm, steps = engines.llm(f"{model}.engine", **case.options)
    got = run_case(llm, case)
    pairs = [
        (f"round {r}, request {i}", answer, want)
        for r, (row, wanted_row) in enumerate(zip(got, wanted, strict=True))
        for i, (answer, want) in enumerate(zip(row, wanted_row, strict=True))
    ]
    assert [f"{n}: {_first(a.ids, w.ids)}" for n, a, w in pairs if a.ids != w.ids] == []
    for name, answer, want in pairs:
        assert answer.reason == want.reason, name
        assert answer.logprob == pytest.approx(want.logprob, abs=2e-3), name
    assert case.steps <= {kind_of(step) for step in steps}


def _first(got: list[int], wanted: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(got))
    return f"from token {at} on: {got[at : at + 4]}, expected {wanted[at : at + 4]}"


def test_decode_steps_of_every_batch_size(engines: Any) -> None:
    """The case of that name really has them, up to the engine's limit."""
    llm, steps = engines.llm("llama.engine")
    run_case(llm, CASE_BY_NAME["every batch size"])
    sizes = {step.plan.num_sequences for step in steps if kind_of(step) == "decode"}
    assert sizes >= set(range(1, llm.engine.manifest.limits.max_batch_size + 1))
