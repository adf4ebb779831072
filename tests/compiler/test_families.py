"""Families whose graphs differ: engines give Hugging Face's greedy ids and logits, alone and batched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapeout.compiler.verify_family import verify_family
from tapeout.model_defs.families import families

#: One for each way of doing a thing; `tapeout models --verify all` tries every family.
NAMES = (
    "apertus", "bloom", "cohere2", "deepseek_v3", "falcon_alibi", "falcon_new", "gemma4_text", "glm4", "gpt2",
    "gpt_neo", "gpt_oss", "gptj", "llama3_1", "mixtral", "mpt", "nemotron", "opt", "phi3_longrope",
    "qwen2_moe",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_logits_are_hugging_faces(timing_cache: Path, name: str) -> None:
    result = verify_family(families()[name], seed=1, timing_cache=timing_cache)
    assert (result.parity, result.notes) == ("exact", "")
    assert result.traced
    assert result.max_abs_logit_diff is not None
    assert 0 < result.max_abs_logit_diff < 2e-3


def test_a_family_that_cannot_be_built_says_why() -> None:
    result = verify_family(families()["diffllama"])
    assert (result.parity, result.traced, result.max_abs_logit_diff) == ("none", False, None)
    assert "attends more than once in layers 0, 1" in result.notes
    assert "/tmp" not in result.notes
