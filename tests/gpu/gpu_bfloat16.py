"""bfloat16: when another id is right, and the families whose attention no other bfloat16 engine here has.

Needs neither torch nor the compiler: GPU machines read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpu_families import FamilyFile, family_file

#: Families with what their tiny model's configuration has beside its file's, or in place of it (None: the key
#: goes): latent attention, then ALiBi as three families scale it. A near tie between experts would move
#: logits by more than rounding does, so there are none, nor keys that only experts read.
CONFIG: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {
        "first_k_dense_replace": 2,
        **dict.fromkeys(("n_group", "n_routed_experts", "num_experts_per_tok", "topk_group")),
    },
    "minicpm3": {},
    "bloom": {},
    "mpt": {},
    "falcon_alibi": {},
}
NEW_TOKENS = 32
#: Ids that a request asks for. After a near tie nothing of an answer can be compared, and tiny models have
#: many, so every few ids a request begins anew behind those that are known.
PIECE_TOKENS = 4


def bfloat16_file(name: str) -> FamilyFile:
    """The family's file, with the configuration and the number of new tokens of its bfloat16 engine."""
    file = family_file(name)
    config = {**file.config, **CONFIG[name]}
    wanted = {key: value for key, value in config.items() if value is not None or key not in CONFIG[name]}
    return replace(file, config=wanted, new_tokens=NEW_TOKENS)


def engine_name(name: str) -> str:
    return f"bf16_{name}.engine"


def answers_name(name: str) -> str:
    return f"bf16_{name}.json"


def first_differences(known: Mapping[str, Any], answers: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Where an answer first differs from the `greedy` ids that are known, by name."""
    found = {}
    for name, ids in answers.items():
        wanted = known[name]["greedy"]
        assert len(ids) == len(wanted), name
        if different := [i for i, (a, b) in enumerate(zip(ids, wanted, strict=True)) if a != b]:
            found[name] = different[0]
    return found


def near_ties(known: Mapping[str, Any], answers: Mapping[str, Sequence[int]]) -> tuple[list[str], list[str]]:
    """DESIGN.md decision 13: where ids first differ from those that are known, Hugging Face's float32 gap
    between its best two logits is at most twice what its own bfloat16 differs there.

    Args:
        known: by name `greedy` ids, and at each of them HF's gap in `gaps` and its error in `bf16_errors`.
        answers: ids by name.

    Returns:
        A line for every difference, and the lines of those that are none.
    """
    lines, wrong = [], []
    for name, i in first_differences(known, answers).items():
        gap, error = known[name]["gaps"][i], known[name]["bf16_errors"][i]
        lines.append(f"{name}: token {i}, HF's gap {gap:.3g}, HF's bfloat16 error {error:.3g}")
        if not is_near_tie(gap, error):
            wrong.append(lines[-1])
    return lines, wrong


def is_near_tie(gap: float, error: float) -> bool:
    return gap <= 2 * error
