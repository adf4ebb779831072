"""Every family of `tapeout models` that the GPU's kernels run: the CPU engine's ids, alone and batched."""

from __future__ import annotations

import pytest
from gpu_bundle import Bundle
from gpu_families import FAMILIES, wrong_answers


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_the_cpu_engines(bundle: Bundle, family: str) -> None:
    assert wrong_answers(bundle, family) == []
