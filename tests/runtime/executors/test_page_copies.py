"""Whole pages on the CPU executor: within the pool, to the host and back, between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeout.plugins.errors import CapacityError, TapeoutError
from tapeout.runtime.engine import open_engine
from tapeout.runtime.executors import load_executor
from tapeout.runtime.executors.cpu import CpuExecutor
from tapeout.runtime.kv_cache import CopyKind, PageCopy
from tapeout.runtime.step import StepInputs

Step = Callable[..., StepInputs]
PROMPT = [3, 14, 15, 9, 2, 6, 5, 3]  # two pages
WITHIN, OFFLOAD, ONBOARD = CopyKind


@pytest.fixture
def tiered(write_model: Callable[..., Path]) -> Iterator[CpuExecutor]:
    with open_engine(write_model()) as engine:
        executor: Any = load_executor(engine, num_pages=10, host_pages=3, threads=2)
        yield executor
        executor.close()


def logits_on(executor: CpuExecutor, step: Step, pages: Sequence[int]) -> np.ndarray:
    """Of one more token behind the prompt whose K and V are in these pages."""
    return executor.forward(step((0, [7], len(PROMPT), [*pages, 9])))


def test_a_copied_page_is_as_good_as_the_first(
    tiered: CpuExecutor, step: Step, reference: Callable[[Sequence[int]], np.ndarray]
) -> None:
    tiered.forward(step((0, PROMPT, 0, [0, 1])))
    wanted = logits_on(tiered, step, [0, 1])
    np.testing.assert_allclose(wanted, reference([*PROMPT, 7])[-1:], rtol=2e-5, atol=2e-5)
    # In the order given: what is copied in one batch may be copied on in it.
    tiered.copy_pages([PageCopy(WITHIN, 0, 4), PageCopy(WITHIN, 4, 5), PageCopy(WITHIN, 1, 4)])
    assert (logits_on(tiered, step, [5, 4]) == wanted).all()
    tiered.copy_pages([PageCopy(OFFLOAD, 0, 2), PageCopy(OFFLOAD, 1, 0)])
    tiered.forward(step((1, [1] * 8, 0, [0, 1])))  # the pages get another owner
    assert not (logits_on(tiered, step, [0, 1]) == wanted).all()
    tiered.copy_pages([PageCopy(ONBOARD, 2, 7), PageCopy(ONBOARD, 0, 6)])
    assert (logits_on(tiered, step, [7, 6]) == wanted).all()


@pytest.mark.parametrize(
    "copy",
    [(WITHIN, 0, 10), (WITHIN, -1, 0), (OFFLOAD, 0, 3), (OFFLOAD, 10, 0), (ONBOARD, 3, 0), (ONBOARD, 0, 10)],
)
def test_pages_that_do_not_exist_are_refused(tiered: CpuExecutor, copy: tuple[CopyKind, int, int]) -> None:
    kind, source, target = copy
    told = rf"(?s)10 device pages and 3 host pages.*{kind.name} {source} -> {target}"
    with pytest.raises(TapeoutError, match=told):
        tiered.copy_pages([PageCopy(WITHIN, 0, 1), PageCopy(*copy)])


def test_an_executor_without_a_host_tier_has_no_host_pages(executor: CpuExecutor) -> None:
    assert executor.host_pages == 0
    executor.copy_pages([])
    with pytest.raises(TapeoutError, match="0 host pages"):
        executor.copy_pages([PageCopy(OFFLOAD, 0, 0)])


def test_a_host_tier_that_does_not_fit_is_refused(write_model: Callable[..., Path]) -> None:
    with open_engine(write_model()) as engine, pytest.raises(CapacityError, match="lower host_cache_bytes"):
        load_executor(engine, num_pages=10, host_pages=1 << 40)
