"""Latent attention and ALiBi in bfloat16: ids up to near ties, logits as close as Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from gpu_bfloat16 import CONFIG, PIECE_TOKENS, answers_name, engine_name, near_ties
from gpu_bundle import Bundle
from gpu_cases import PAGES, kind_of, logits_of_steps, rms

from tapeout.runtime import SamplingParams
from tapeout.runtime.engine import open_engine
from tapeout.runtime.executors import load_executor

GREEDY = SamplingParams(temperature=0, max_tokens=PIECE_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("family", CONFIG)
def test_ids_diverge_only_at_near_ties(
    bundle: Bundle, engines: Any, report: Callable[[str], None], family: str
) -> None:
    """From the CPU float32 engine's, which are Hugging Face's; each piece alone, then all at once."""
    known = bundle.json(answers_name(family))
    pieces = known["pieces"]
    asked = [{"prompt_token_ids": piece["prompt"]} for piece in pieces.values()]
    llm, steps = engines.llm(engine_name(family))
    alone = [llm.generate(one, GREEDY)[0] for one in asked]
    assert {kind_of(step) for step in steps} == {"context", "decode"}
    together = llm.generate(asked, GREEDY)
    report(f"bfloat16, {family}: {known['decided']:.0%} of the ids stand before any near tie")
    wrong = []
    for how, outputs in (("alone", alone), ("together", together)):
        answers = {n: o.outputs[0].token_ids for n, o in zip(pieces, outputs, strict=True)}
        lines, unexplained = near_ties(pieces, answers)
        for line in lines:
            report(f"bfloat16, {family}, {how}, prompt {line}")
        wrong += unexplained
    assert wrong == []


@pytest.mark.parametrize("family", CONFIG)
def test_logits_are_as_close_as_hugging_faces(
    bundle: Bundle, report: Callable[[str], None], family: str
) -> None:
    """At most twice as far from float32 as HF's own bfloat16: prompts, decoding and both in a step, each
    captured at first and replayed the second time."""
    known = bundle.json(answers_name(family))
    with open_engine(bundle.path(engine_name(family))) as engine:
        executor = load_executor(engine, num_pages=PAGES * engine.manifest.limits.max_batch_size)
        with closing(executor):
            found = [logits_of_steps(executor) for _ in range(2)]
    errors = {}
    for step, values in known["logits"].items():
        wanted = np.array(values)
        for turn, got in zip(("captured", "replayed"), found, strict=True):
            errors[step, turn] = rms(got[step] - wanted) / rms(wanted)
    hf_errors = known["hf_errors"]
    worst = max(errors, key=errors.__getitem__)
    report(
        f"bfloat16, {family}: logits differ from float32 by {errors[worst]:.2%} at most ({worst[0]}), "
        f"HF's by {hf_errors[worst[0]]:.2%} there"
    )
    assert {place: error for place, error in errors.items() if not error <= 2 * hf_errors[place[0]]} == {}
