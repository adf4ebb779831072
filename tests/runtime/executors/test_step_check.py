"""The check of a step: a sound one passes, and no single wrong number does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.executors.step_check import NO_TOKEN, StepChecker
from tapeout.runtime.step import FROM_SLOT, StepInputs

LIMITS = Limits(max_batch_size=4, max_num_tokens=16, max_seq_len=40, tokens_per_page=4)
VOCAB, PAGES = 50, 30
LAST_IDS = np.array([7, NO_TOKEN, 8, 9], np.int32)

#: Wrong for every array but `token_ids`, by a little and by much, on both sides.
WRONG = (-(2**31), -7, -1, 41, 50, 2**31 - 1)


@pytest.fixture(params=["mixed", "decode"])
def sound(request: pytest.FixtureRequest, step: Callable[..., StepInputs]) -> StepInputs:
    if request.param == "mixed":
        return step((1, [3, 4, 5], 4, [0, 29]), (0, [FROM_SLOT], 8, [5, 6, 7]), (3, [FROM_SLOT], 0, [9]))
    return step(
        (3, [FROM_SLOT], 3, [5]), (0, [FROM_SLOT], 8, [0, 6, 29]), (2, [FROM_SLOT], 39, list(range(10, 20)))
    )


def check(inputs: StepInputs) -> list[int]:
    ids: list[int] = StepChecker(LIMITS, VOCAB, PAGES).check(inputs, LAST_IDS).tolist()
    return ids


def test_ids_come_from_the_slots(sound: StepInputs) -> None:
    assert check(sound) in ([3, 4, 5, 7, 9], [9, 7, 8])


@pytest.mark.parametrize(
    "name", ["token_ids", "positions", "kv_lens", "slots", "row_ids", "row_slots", "cu_q"]
)
def test_any_wrong_number_is_refused(sound: StepInputs, name: str) -> None:
    for index in range(len(getattr(sound, name))):
        for value in WRONG:
            if name == "token_ids" and value in (FROM_SLOT, 41):
                continue
            values = getattr(sound, name).copy()
            values[index] = value
            with pytest.raises(TapeoutError, match="the step's inputs are invalid"):
                check(replace(sound, **{name: values}))


def test_every_page_in_use_is_looked_at(sound: StepInputs) -> None:
    used = -(-sound.kv_lens // LIMITS.tokens_per_page)
    for row, column in np.ndindex(sound.page_table.shape):
        for value in (-(2**31), -1, PAGES, 2**31 - 1):
            table = sound.page_table.copy()
            table[row, column] = value
            if column >= used[row]:
                check(replace(sound, page_table=table))
                continue
            with pytest.raises(TapeoutError, match=r"page ids outside \[0, 30\)"):
                check(replace(sound, page_table=table))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"positions": lambda a: a.astype(np.int64)}, "arrays of int32, int64, expected int32"),
        ({"kv_lens": lambda a: a[:-1]}, "2 cache lengths for 3 sequences"),
        ({"page_table": lambda a: a[:, :1].copy()}, "a page table of 1 pages for"),
        ({"slots": lambda a: a + 2, "row_slots": lambda a: a + 2}, r"slots outside \[0, 4\)"),
    ],
)
def test_a_fault_is_named(sound: StepInputs, changes: dict[str, Any], expected: str) -> None:
    changed = {name: change(getattr(sound, name)) for name, change in changes.items()}
    with pytest.raises(TapeoutError, match=expected):
        check(replace(sound, **changed))
