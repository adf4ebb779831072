"""Every family of `tapeout models` on a GPU: which there are, how they are built, what they are asked.

A family's prompts are those of `tapeout models --verify`: the last is longer than any window of the tiny
models and ends beyond any original context. Needs neither torch nor the compiler: GPU machines read it.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_bundle import ROOT, Bundle
from gpu_cases import ALL, VOCAB_SIZE, Answer, Asked, Case, differences, from_json, kind_of, run_case

from tapeout.runtime import LLM

FOLDER = ROOT / "model_defs" / "families"
#: Prompts come in chunks of two pages; few buckets, so that an engine has few kernels.
LIMITS = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 112, "tokens_per_page": 16}
#: A tenth of a second saved for every family: the pool is not all of the GPU's memory.
OPTIONS = {"enable_prefix_reuse": False, "max_tokens_in_kv_cache": 512}
#: What the tiny model is not, beside its family's file: parts of heads that a GPU reads 16 bytes at a time.
_LATENT = {"qk_rope_head_dim": 16, "head_dim": 16}
CONFIG: Mapping[str, Mapping[str, Any]] = dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu"), _LATENT
)
#: Families that the CPU runs and a GPU does not, with a part of what the build says.
REFUSED: Mapping[str, str] = {}


@dataclass(frozen=True)
class FamilyFile:
    """What a family's file says of its tiny model (see model_defs/families/__init__.py)."""

    name: str
    model_type: str
    config: Mapping[str, Any]
    prompt_lengths: tuple[int, ...]
    new_tokens: int

    @property
    def engine(self) -> str:
        return f"family_{self.name}.engine"

    def case(self, seed: int = 0) -> Case:
        """Each prompt alone, with log probabilities, then all of them at once."""
        draw = random.Random(f"{self.name} {seed}")
        prompts = [tuple(draw.choices(range(5, VOCAB_SIZE), k=n)) for n in self.prompt_lengths]
        params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": self.new_tokens}
        alone = tuple((Asked(prompt, {**params, "logprobs": 2}),) for prompt in prompts)
        together = tuple(Asked(prompt, params) for prompt in prompts)
        return Case(self.name, (*alone, together), OPTIONS, ALL)


def family_file(name: str) -> FamilyFile:
    data = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    verify = data.get("verify", {})
    return FamilyFile(
        name,
        data.get("model_type", name),
        {**data.get("config", {}), **CONFIG.get(name, {})},
        tuple(verify.get("prompt_lengths", (5, 23, 75))),
        verify.get("new_tokens", 12),
    )


def recorded_differences() -> dict[str, float]:
    """Families that the record calls exact, with how far the CPU engine's logits are from Hugging Face's."""
    results = json.loads((FOLDER / "results.json").read_text())["results"]
    return {r["family"]: r["max_abs_logit_diff"] for r in results if r["parity"] == "exact"}


#: Names of the families that run on a GPU.
FAMILIES = tuple(sorted(set(recorded_differences()) - set(REFUSED)))
#: Of the bundle: what the CPU engines answered, and the seed of each family's weights and prompts.
ANSWERS = "families.json"


def wrong_answers(bundle: Bundle, name: str) -> list[str]:
    """What the bundle's engine of a family answers otherwise than the CPU's did."""
    file, known = family_file(name), bundle.json(ANSWERS)[name]
    case = file.case(known["seed"])
    got, kinds = answers_of(bundle.path(file.engine), case)
    missing = [f"no {kind} step" for kind in sorted(case.steps - kinds)]
    return differences(got, from_json(known["answers"])) + missing


def answers_of(engine: Path, case: Case) -> tuple[list[list[Answer]], set[str]]:
    """An engine's answers to a case, and the kinds of steps it took."""
    steps: list[Any] = []
    with LLM(engine, on_step=steps.append, **case.options) as llm:
        return run_case(llm, case), set(map(kind_of, steps))
