"""`--batch-invariant`, in bfloat16: a row's logits have the same bits alone and in company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_bundle import Bundle
from gpu_cases import PAGES
from gpu_cases import packed_step as step

from tapeout.runtime import SamplingParams
from tapeout.runtime.engine import open_engine
from tapeout.runtime.executors import load_executor

LENGTHS = (5, 33, 1, 16, 24, 2)  # 81 rows: the largest step is padded up
ENGINE = "invariant.engine"


@pytest.fixture(scope="module")
def executor(bundle: Bundle) -> Iterator[Any]:
    with open_engine(bundle.path(ENGINE)) as engine:
        loaded = load_executor(engine, num_pages=PAGES * len(LENGTHS))
        yield loaded
        loaded.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(5, 300, n).tolist() for n in LENGTHS]


def bits(logits: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in logits]


def test_prompts(executor: Any, prompts: list[list[int]]) -> None:
    alone = [bits(executor.forward(step([(i, ids, 0)])))[0] for i, ids in enumerate(prompts)]
    assert len(set(alone)) == len(alone)
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0], [1, 5, 3]):
        # Context stands first: of prompts with one token nothing tells whether they are context.
        together = bits(executor.forward(step([(i, prompts[i], 0) for i in order])))
        assert together == [alone[i] for i in order], order


def test_decoding(executor: Any, prompts: list[list[int]]) -> None:
    for i, ids in enumerate(prompts):
        executor.forward(step([(i, ids, 0)]))
    alone = [bits(executor.forward(step([(i, [9 + i], n)])))[0] for i, n in enumerate(LENGTHS)]
    for count in range(2, len(LENGTHS) + 1):
        for order in (range(count), range(len(LENGTHS) - count, len(LENGTHS))):
            together = bits(executor.forward(step([(i, [9 + i], LENGTHS[i]) for i in order])))
            assert together == [alone[i] for i in order], list(order)


def test_decoding_beside_a_prompt(executor: Any, prompts: list[list[int]]) -> None:
    for i, ids in enumerate(prompts[:3]):
        executor.forward(step([(i, ids, 0)]))
    decode = [(i, [9 + i], LENGTHS[i]) for i in range(3)]
    alone = [bits(executor.forward(step([row])))[0] for row in [(3, prompts[3], 0), *decode]]
    assert bits(executor.forward(step([(3, prompts[3], 0), *decode]))) == alone


def test_ids_do_not_depend_on_scheduling(engines: Any, prompts: list[list[int]]) -> None:
    """Greedy and sampled, in bfloat16, where a last bit decides often enough over so many tokens."""
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=60, ignore_eos=True)
        for i in range(len(prompts))
    ]
    llm, _ = engines.llm(ENGINE)
    alone = [llm.generate(a, p)[0].outputs[0].token_ids for a, p in zip(asked, params, strict=True)]
    for options in ({}, {"chunk_tokens": 7}, {"max_num_tokens": 8}, {"max_batch_size": 3}):
        packed, steps = engines.llm(ENGINE, **options)
        outputs = packed.generate(asked, params)
        assert [o.outputs[0].token_ids for o in outputs] == alone, options
        assert max(s.plan.num_sequences for s in steps) > 1
