"""What tiny engines are asked on both targets: requests, lower limits, and the steps that must occur.

One definition, run on the CPU when the bundle is made and on the GPU by the tests. Sampling and
float32 greedy ids do not depend on who shares a step, so the answers must be the same ids.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.step import StepInputs

VOCAB_SIZE = 300  # of tests/models.py
#: Build options of tiny engines: prompts cross pages, steps and windows soon.
LIMITS = {"max_batch_size": 6, "max_num_tokens": 96, "max_seq_len": 256, "tokens_per_page": 16}
WINDOW = 16
#: Of the sum over a request's ids: float32 sums in another order.
LOGPROB_TOLERANCE = 2e-3

CONTEXT, MIXED, DECODE = "context", "mixed", "decode"


@dataclass(frozen=True)
class Asked:
    """A prompt and the fields of its SamplingParams."""

    prompt: tuple[int, ...]
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """Rounds of requests, one after the other; those of a round are in flight together.

    Attributes:
        options: of `LLM`, lower limits than the engine's.
        steps: kinds of steps that must occur, so that the case is what its name says.
        joining: a round's requests come from threads, each when the one before has a few tokens.
    """

    name: str
    rounds: tuple[tuple[Asked, ...], ...]
    options: Mapping[str, int] = field(default_factory=dict)
    steps: frozenset[str] = frozenset({CONTEXT, DECODE})
    joining: bool = False


@dataclass
class Answer:
    """Ids, the sum of their log probabilities when asked for, and why they end."""

    ids: list[int]
    logprob: float | None
    reason: str | None


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(f"{length} {seed}").choices(range(5, VOCAB_SIZE), k=length))


def _asked(lengths: Sequence[int], seed: int = 0, **params: Any) -> tuple[Asked, ...]:
    given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20, **params}
    return tuple(Asked(_prompt(n, seed + i), given) for i, n in enumerate(lengths))


#: Around the borders of pages, the window and the smaller buckets.
_LENGTHS = (5, 40, 1, 77, 16, 3, 17, 33, 15, 2)
_SAMPLED = (
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.0},
    {"temperature": 1.7, "min_p": 0.05, "seed": 2**63 - 1},
    {"temperature": 0.5, "top_k": 1, "seed": 9},
    {"temperature": 3.0, "top_p": 0.5, "seed": 12},
    {"temperature": 50.0, "seed": 5, "ignore_eos": False, "max_tokens": 60},
    {"temperature": 1e-5, "seed": 6},
)
#: What takes the full kernels; one in each step is enough for all its rows to go through them.
_FULL = (
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5, "temperature": 0.8, "seed": 4},
    {"logprobs": 3},
    {"min_tokens": 12, "stop_token_ids": [7, 8, 9], "temperature": 2.0, "seed": 8, "ignore_eos": False},
    {},
    {"temperature": 0.7, "seed": 11, "logprobs": 0},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.5, "temperature": 1.1, "top_k": 9, "seed": 21},
    {"presence_penalty": 2.0, "temperature": 1.4, "top_p": 0.8, "min_p": 0.01, "seed": 22, "logprobs": 20},
)

ALL = frozenset({CONTEXT, MIXED, DECODE})
CASES = (
    Case("alone", tuple((asked,) for asked in _asked((1, 15, 16, 17, 60)))),
    Case("packed", (_asked(_LENGTHS, 10, max_tokens=24),), steps=ALL),
    Case(
        "every batch size",
        tuple(_asked([3 + i for i in range(n)], 20 * n, max_tokens=5) for n in range(1, 7)),
    ),
    Case("beyond windows", (_asked((150, 200, 97), 30, max_tokens=40),), steps=ALL),
    Case("in chunks", (_asked((100, 6, 31, 14, 1, 64), 40),), {"chunk_tokens": 7}, ALL),
    Case("few tokens a step", (_asked((30, 9, 1, 50, 7, 22, 4), 50),), {"max_num_tokens": 6}, ALL),
    Case(
        "few pages",
        (_asked((60, 30, 90, 20, 5, 40), 60, max_tokens=30),),
        {"max_tokens_in_kv_cache": 256},
        frozenset({CONTEXT}),
    ),
    Case(
        "sampled",
        (
            tuple(
                Asked(_prompt(4 + 3 * i, 70 + i), {"ignore_eos": True, "max_tokens": 12 + 4 * i, **params})
                for i, params in enumerate(_SAMPLED)
            ),
        ),
        steps=ALL,
    ),
    Case(
        "penalties, minimums, logprobs",
        (
            tuple(
                Asked(
                    _prompt(4 + 5 * i, 80 + i),
                    {"ignore_eos": True, "max_tokens": 20 + 3 * i, "temperature": 0.0, **params},
                )
                for i, params in enumerate(_FULL)
            ),
        ),
        steps=ALL,
    ),
    # Twelve prompts of six pages with a common beginning, in a pool of twenty: pages are shared, copied,
    # and most go to the host and come back.
    Case(
        "reused, copied, offloaded",
        tuple(
            tuple(
                Asked(_prompt(40, 100) + _prompt(50 + i, 101 + i), {"temperature": 0.0, "max_tokens": 12})
                for i in order
            )
            for order in ((0, 1, 2), (3, 4, 5, 6), (7, 8, 9, 10, 11), (0, 5, 11, 1), (0,), (2, 3, 4, 6))
        ),
        {"max_tokens_in_kv_cache": 20 * 16, "host_cache_bytes": 1 << 22},
    ),
    Case("joining", (_asked(_LENGTHS, 90, max_tokens=24),), steps=ALL, joining=True),
)
CASE_BY_NAME = {case.name: case for case in CASES}


def run_case(llm: LLM, case: Case) -> list[list[Answer]]:
    """Answers by round and request."""
    return [(_joining if case.joining else _together)(llm, asked) for asked in case.rounds]


def _together(llm: LLM, asked: Sequence[Asked]) -> list[Answer]:
    outputs = llm.generate(
        [{"prompt_token_ids": list(a.prompt)} for a in asked], [SamplingParams(**a.params) for a in asked]
    )
    answers = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.finish_reason != "error", completion.stop_reason
        answers.append(
            Answer(list(completion.token_ids), completion.cumulative_logprob, completion.finish_reason)
        )
    return answers


def _joining(llm: LLM, asked: Sequence[Asked]) -> list[Answer]:
    prompts = [list(a.prompt) for a in asked]
    ids = stream_joining(llm, prompts, [SamplingParams(**a.params) for a in asked])
    return [Answer(answer, None, "length") for answer in ids]


def stream_joining(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Ids of streams in threads, each queued when the one before it has its third token and goes on only
    after that: so prompts meet requests that decode, however fast the steps are."""
    answers: list[list[int]] = [[] for _ in prompts]
    errors: list[BaseException] = []
    turn = [threading.Event() for _ in range(len(prompts) + 1)]
    queued = [threading.Event() for _ in range(len(prompts) + 1)]
    turn[0].set()
    queued[-1].set()

    def ask(index: int) -> None:
        turn[index].wait()
        try:
            stream = llm.stream({"prompt_token_ids": list(prompts[index])}, params[index])
            queued[index].set()
            for delta in stream:
                answers[index] += delta.outputs[0].token_ids
                if len(answers[index]) >= 3:
                    turn[index + 1].set()
                    queued[index + 1].wait()
        except BaseException as error:
            errors.append(error)
        finally:
            queued[index].set()
            turn[index + 1].set()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if errors:
        raise errors[0]
    return answers


def differences(got: Sequence[Sequence[Answer]], wanted: Sequence[Sequence[Answer]]) -> list[str]:
    """What is wrong with answers, a line each."""
    problems = []
    for r, (row, wanted_row) in enumerate(zip(got, wanted, strict=True)):
        for i, (answer, want) in enumerate(zip(row, wanted_row, strict=True)):
            where = f"round {r}, request {i}:"
            if answer.ids != want.ids:
                problems.append(f"{where} {_first(answer.ids, want.ids)}")
                continue
            if answer.reason != want.reason:
                problems.append(f"{where} ends with {answer.reason}, expected {want.reason}")
            if not _close(answer.logprob, want.logprob):
                problems.append(f"{where} log probability {answer.logprob}, expected {want.logprob}")
    return problems


def _close(got: float | None, wanted: float | None) -> bool:
    """Not a number is close to nothing."""
    if got is None or wanted is None:
        return got is wanted
    return abs(got - wanted) <= LOGPROB_TOLERANCE


def _first(got: Sequence[int], wanted: Sequence[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(got))
    return f"from token {at} on {got[at : at + 4]}, expected {wanted[at : at + 4]}"


def kind_of(record: Any) -> str:
    """What kind of step a StepRecord is of."""
    plan = record.plan
    if plan.context and plan.generation:
        return MIXED
    return CONTEXT if plan.context else DECODE


def to_json(answers: Sequence[Sequence[Answer]]) -> list[list[dict[str, Any]]]:
    return [[vars(answer) for answer in row] for row in answers]


def from_json(rows: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Answer]]:
    return [[Answer(**answer) for answer in row] for row in rows]


# ---- steps without a scheduler --------------------------------------------------------------------

PAGES = 4  # of a sequence


def packed_step(rows: Sequence[tuple[int, Sequence[int], int]]) -> StepInputs:
    """Sequences (slot, new ids, tokens cached before), each in pages of its own, the last row sampled."""
    lengths = [len(ids) for _, ids, _ in rows]
    cu_q = np.concatenate([[0], np.cumsum(lengths)])
    arrays = {
        "token_ids": [i for _, ids, _ in rows for i in ids],
        "positions": [cached + i for _, ids, cached in rows for i in range(len(ids))],
        "cu_q": cu_q,
        "kv_lens": [cached + len(ids) for _, ids, cached in rows],
        "page_table": [[PAGES * slot + i for i in range(PAGES)] for slot, _, _ in rows],
        "slots": [slot for slot, _, _ in rows],
        "row_ids": cu_q[1:] - 1,
        "row_slots": [slot for slot, _, _ in rows],
    }
    return StepInputs(**{name: np.array(values, np.int32) for name, values in arrays.items()})


#: A step's rows, as `packed_step` takes them.
_Rows = list[tuple[int, tuple[int, ...], int]]


def _steps() -> dict[str, _Rows]:
    """Prompts packed together, decoding, both in one step, and one sequence."""
    prompts = [_prompt(length, seed=7) for length in (5, 33, 1, 16)]
    first, last = list(enumerate(prompts[:3])), prompts[3]
    return {
        CONTEXT: [(slot, ids, 0) for slot, ids in first],
        DECODE: [(slot, (9 + slot,), len(ids)) for slot, ids in first],
        MIXED: [(3, last, 0), *((slot, (20 + slot,), len(ids) + 1) for slot, ids in first)],
        "alone": [(3, (30,), len(last))],
    }


def logits_of_steps(executor: Any) -> dict[str, np.ndarray]:
    """Float32 [rows, VOCAB_SIZE] of prompts packed together, of decoding, of both in one step, and alone."""
    return {name: executor.forward(packed_step(rows)) for name, rows in _steps().items()}


def histories_of_steps() -> dict[str, list[tuple[int, ...]]]:
    """All ids of the sequences that each row of `logits_of_steps` is the last of."""
    cached: dict[int, tuple[int, ...]] = {}
    histories = {}
    for name, rows in _steps().items():
        cached |= {slot: cached.get(slot, ())[:start] + ids for slot, ids, start in rows}
        histories[name] = [cached[slot] for slot, _, _ in rows]
    return histories


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
