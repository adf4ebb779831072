"""End ids, dtype and vocabulary of a checkpoint are Hugging Face's, however its files disagree.

One bf16 Gemma 2 whose config.json and generation_config.json name different end ids and whose logits are
wider than its tokenizer. What is expected comes from transformers' `generate` on the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine import open_engine

PROMPTS = ([0, 70, 80, 90, 100, 110], [0, 200, 150, 120], [0, 33, 44, 55, 66])
MAX_TOKENS, KNOWN, WIDTH = 40, 300, 512
LIMITS = (
    "--max-batch-size",
    "4",
    "--max-num-tokens",
    "16",
    "--max-seq-len",
    "128",
    "--tokens-per-page",
    "16",
)


def hf_greedy(folder: Path, **settings: Any) -> list[list[int]]:
    """What `generate` adds to each prompt; unknown ids are suppressed, as in an engine."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    unknown = list(range(KNOWN, WIDTH))
    with torch.no_grad():
        return [
            model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_TOKENS, suppress_tokens=unknown,
                **settings,
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, int]]:
    """The folder, and the two ids that its generation_config names as ends."""
    folder = tmp_path_factory.mktemp("ends") / "model"
    models.make_tiny(
        "gemma2", folder, dtype="bfloat16", vocab_size=WIDTH, tie_word_embeddings=False,
        query_pre_attn_scalar=16,
    )  # fmt: skip
    free = hf_greedy(folder, eos_token_id=-1)
    ends = free[0][7], free[1][3]
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": list(ends)}))
    config = json.loads((folder / "config.json").read_text())
    other = next(i for i in free[2] if i not in ends)  # would end the third answer if it counted
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": other}))
    return folder, ends


@pytest.fixture(scope="module")
def engine(
    checkpoint: tuple[Path, tuple[int, int]],
    invoke: Callable[..., Any],
    tiny_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path: Path = tmp_path_factory.mktemp("ends-engine") / "m.engine"
    arguments = ("-o", path, "--dtype", "float32", "--timing-cache", tiny_cache, "--no-verify", *LIMITS)
    result = invoke("build", checkpoint[0], *arguments)
    assert result.exit_code == 0, result.stderr
    return path


def test_either_end_id_of_generation_config_ends_an_answer_and_no_other(
    checkpoint: tuple[Path, tuple[int, int]], engine: Path
) -> None:
    folder, ends = checkpoint
    want = hf_greedy(folder)
    assert {ids[-1] for ids in want if len(ids) < MAX_TOKENS} == set(ends)  # both end an answer in HF
    with open_engine(engine) as opened:
        assert opened.manifest.tokenizer.eos_token_ids == ends
    with LLM(engine) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in PROMPTS], SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        )
    for output, ids in zip(outputs, want, strict=True):
        (answer,) = output.outputs
        ended = ids[-1] in ends
        assert answer.finish_reason == ("stop" if ended else "length")
        assert [i for i in answer.token_ids if i not in ends] == [i for i in ids if i not in ends]


def test_ids_the_tokenizer_does_not_know_are_never_sampled(engine: Path) -> None:
    with open_engine(engine) as opened:
        assert opened.manifest.model.vocab_size == WIDTH
        assert opened.manifest.tokenizer.vocab_size == KNOWN
    prompts = [{"prompt_token_ids": p} for p in PROMPTS * 4]
    hot = [
        SamplingParams(temperature=50.0, max_tokens=100, ignore_eos=True, seed=i) for i in range(len(prompts))
    ]
    with LLM(engine) as llm:
        outputs = llm.generate(prompts, hot)
    ids = [i for output in outputs for i in output.outputs[0].token_ids]
    assert len(ids) == 100 * len(outputs)
    assert max(ids) < KNOWN
    assert len(set(ids)) > 250  # nearly uniform: of 1,200 draws over all logits two in five would be unknown


def test_a_bf16_checkpoint_is_built_in_bf16_unless_asked_and_never_in_fp16(
    checkpoint: tuple[Path, tuple[int, int]], invoke: Callable[..., Any], tiny_cache: Path, tmp_path: Path
) -> None:
    """Gemma's norms overflow float16; engines compute in none, and say so before anything is traced."""
    refused = invoke("build", checkpoint[0], "-o", tmp_path / "m.engine", "--dtype", "fp16")
    assert refused.exit_code == 5
    assert "float16" in refused.stderr
    assert "--dtype bfloat16" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    planned = invoke("build", checkpoint[0], "--dry-run", "--timing-cache", tiny_cache, *LIMITS)
    assert planned.exit_code == 0, planned.stderr
    assert "bfloat16" in planned.stdout + planned.stderr
