"""Steps of a real program that fail: out of memory, an exception, logits that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.executors.cpu.replay import Bucket, Replay

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 3, 5], [8, 9, 7], [9, 3, 2, 3, 8, 4, 6, 2]]
Expected = Callable[[Mapping[str, np.ndarray], Sequence[int], int], list[int]]


def generate(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Any]:
    return [o.outputs[0] for o in llm.generate([{"prompt_token_ids": list(p)} for p in prompts], GREEDY)]


def nothing_is_left(llm: LLM) -> None:
    assert llm.stats().num_requests_running == 0
    llm._turn()  # a surplus step is read
    stats = llm.prefix_cache.stats()
    assert llm.stats().kv_pages_used == 0
    assert (stats.device_pages, stats.host_pages) == (0, 0)


@pytest.mark.parametrize(
    "error", [MemoryError("scripted"), RuntimeError("DefaultCPUAllocator: can't allocate")]
)
@pytest.mark.parametrize("when", ["context", "generation"])
def test_it_fails_its_requests_with_the_reason_and_the_loop_goes_on(
    write_model: Callable[..., Path], weights: Mapping[str, np.ndarray], greedy_ids: Expected,
    monkeypatch: pytest.MonkeyPatch, error: Exception, when: str,
) -> None:  # fmt: skip
    bucket, count = Replay.bucket, 0

    def failing(self: Replay, t: int, r: int) -> Bucket:
        nonlocal count
        count += 1
        if count == (1 if when == "context" else 5):
            raise error
        return bucket(self, t, r)

    with LLM(write_model(), max_tokens_in_kv_cache=120, threads=1) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(Replay, "bucket", failing)
            failed = generate(llm, PROMPTS)
        # Of twelve rows the first step has two prompts; the third comes with the next, which was planned on
        # ids of the first, and is not its concern.
        hit = 2 if when == "context" else 3
        for f, prompt in zip(failed[:hit], PROMPTS, strict=False):
            assert f.finish_reason == "error"
            assert str(error) in f.stop_reason
            said = list(f.token_ids)
            assert said == greedy_ids(weights, prompt, len(said))
            assert bool(said) == (when == "generation")
        for f in failed[hit:]:
            assert list(f.token_ids) == greedy_ids(weights, PROMPTS[2], 8)
        if hit == 3:
            nothing_is_left(llm)
        again = generate(llm, PROMPTS)
        assert [list(a.token_ids) for a in again] == [greedy_ids(weights, p, 8) for p in PROMPTS]


def test_logits_that_are_not_finite_fail_their_request_only(
    write_model: Callable[..., Path], weights: Mapping[str, np.ndarray], greedy_ids: Expected
) -> None:
    """An id whose embedding is NaN: whoever reads it fails, and nothing of it is kept."""
    cursed = dict(weights)
    cursed["embed"] = weights["embed"].copy()
    poison = next(i for i in range(29) if all(i not in [*p, *greedy_ids(weights, p, 8)] for p in PROMPTS))
    cursed["embed"][poison] = np.nan
    bad = [*PROMPTS[0], poison]
    with LLM(write_model(values=cursed), threads=1) as llm:
        first, failed, last = generate(llm, [PROMPTS[1], bad, PROMPTS[2]])
        assert failed.finish_reason == "error"
        assert "not finite" in failed.stop_reason
        for output, prompt in ((first, PROMPTS[1]), (last, PROMPTS[2])):
            assert list(output.token_ids) == greedy_ids(weights, prompt, 8)
        # Its first two pages hold sound ids, and are not kept all the same.
        (again,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY)
        assert again.num_cached_tokens == 0
        assert list(again.outputs[0].token_ids) == greedy_ids(weights, PROMPTS[0], 8)
        (failed,) = generate(llm, [bad])
        assert failed.finish_reason == "error"
