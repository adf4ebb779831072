"""Tiny float32 models of several architectures: the CPU engine's ids, whatever shares the steps."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_bundle import TINY, Bundle
from gpu_cases import CASE_BY_NAME, differences, from_json, kind_of, run_case


@pytest.mark.parametrize("case_name", CASE_BY_NAME)
@pytest.mark.parametrize("model", TINY)
def test_ids_are_the_cpu_engines(bundle: Bundle, engines: Any, model: str, case_name: str) -> None:
    case = CASE_BY_NAME[case_name]
    wanted = from_json(bundle.json(f"{model}.json")[case_name])
    llm, steps = engines.llm(f"{model}.engine", **case.options)
    got = run_case(llm, case)
    assert differences(got, wanted) == []
    assert case.steps <= {kind_of(step) for step in steps}


def test_decode_steps_of_every_batch_size(engines: Any) -> None:
    """The case of that name really has them, up to the engine's limit."""
    llm, steps = engines.llm("llama.engine")
    run_case(llm, CASE_BY_NAME["every batch size"])
    sizes = {step.plan.num_sequences for step in steps if kind_of(step) == "decode"}
    assert sizes >= set(range(1, llm.engine.manifest.limits.max_batch_size + 1))
