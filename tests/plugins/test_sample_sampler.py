"""The sampler: Philox vectors, HF's processors, the distribution, and independence of company."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.choose import choose_id, weights_of
from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.philox import draw_u64, philox4x32
from tapeout.plugins.sample.result import SampleResult
from tapeout.plugins.sample.sampler import Sampler

V = 64
EOS = 1
DRAWS = 800


def make(valid: int = V, slots: int = 4) -> Sampler:
    return Sampler(slots, V, valid, (EOS,))


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, V)) * scale).astype(np.float32)


def sample_one(sampler: Sampler, row: np.ndarray, position: int = 0, slot: int = 0) -> int:
    return int(sampler.sample(row[None], np.array([slot]), np.array([position])).token_ids[0])


def support(row: np.ndarray, **options: Any) -> set[int]:
    """Every id that some draw gives: the whole range of words, in steps of 1/300."""
    keys = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    words = np.linspace(0, 2**64 - 1, 300, dtype=np.float64).clip(0, 2.0**64 - 2048)
    return {choose_id(row, word=int(w), **keys) for w in words}


# ---- Philox -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123, philox4x32 with 10 rounds
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    other = [[7] * 4, [9] * 2]  # a second row: vectorised rows do not mix
    words = philox4x32(
        np.array([other[0], counter], dtype=np.uint32), np.array([other[1], key], dtype=np.uint32)
    )
    assert words[1].tolist() == expected


def test_a_draw_is_a_function_of_all_bits_of_seed_and_position() -> None:
    seeds = np.array([0, 1, 2**32, 2**63, 0], dtype=np.uint64)
    words = draw_u64(seeds, np.array([0, 0, 0, 0, 1]))
    assert len(set(words.tolist())) == 5
    assert int(words[0]) == 0x6627E8D5E169C58D


# ---- greedy -------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_maxima() -> None:
    sampler, row = make(), np.zeros(V, dtype=np.float32)
    row[[40, 9, 17]] = 5
    sampler.admit(0, SamplingParams(temperature=0), np.array([2]))
    assert sample_one(sampler, row) == 9


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    sampler, row = make(valid=50), random_logits(1)[0]
    row[50:] = 100
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=5.0, seed=1)):
        sampler.admit(0, params, np.array([55, 2]))
        assert all(sample_one(sampler, row, p) < 50 for p in range(300))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "frequency_penalty": 0.9, "presence_penalty": 0.3},
        {"min_tokens": 9, "stop_token_ids": tuple(range(1, V, 2))},
        {"temperature": 0.9, "seed": 3, "frequency_penalty": 1.5},
    ],
)
def test_a_request_goes_on_in_another_slot_where_it_was_paused(options: dict[str, Any]) -> None:
    params, logits = SamplingParams(**{"temperature": 0} | options), np.repeat(random_logits(1), 12, 0)

    def run(sampler: Sampler, slot: int, positions: range) -> list[int]:
        return [
            int(sampler.sample(logits[p : p + 1], np.array([slot]), np.array([p])).token_ids[0])
            for p in positions
        ]

    through, paused = make(), make()
    through.admit(0, params, np.array([2, 3]))
    whole = run(through, 0, range(12))
    paused.admit(0, params, np.array([2, 3]))
    before = run(paused, 0, range(5))
    paused.admit(1, params, np.array([2, 3]), np.array(before, np.int32))
    assert before + run(paused, 1, range(5, 12)) == whole
    # And it does make a difference.
    paused.admit(1, params, np.array([2, 3, *before]))
    assert before + run(paused, 1, range(5, 12)) != whole


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_rows_are_flagged_and_change_nothing(bad: float) -> None:
    sampler, logits = make(), random_logits(2)
    logits[0, 33] = bad
    for slot in (0, 1):
        sampler.admit(slot, SamplingParams(temperature=0, repetition_penalty=1.5), np.array([2]))
    result = sampler.sample(logits, np.array([0, 1]), np.array([0, 0]))
    assert result.finite.tolist() == [False, True]
    assert result.token_ids.dtype == np.int32
    assert sampler._slots[0].num_sampled == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("trouble", ["overflow", "all masked", "exception"])
def test_a_row_without_a_choice_leaves_the_others_alone(
    trouble: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, options = random_logits(2), {"temperature": temperature, "seed": 1}
    own: dict[str, Any] = {"repetition_penalty": 1e-3}
    logits[0, 2] = 3e38  # divided by the penalty it is infinite
    if trouble == "all masked":
        own = {"min_tokens": 3, "max_tokens": 9, "stop_token_ids": tuple(range(V))}
    elif trouble == "exception":
        own = {"logprobs": 1}
        monkeypatch.setattr("tapeout.plugins.sample.sampler.top_logprobs", lambda *args: 1 / 0)
    alone, sampler = make(), make()
    for slot, params in ((0, SamplingParams(**options, **own)), (1, SamplingParams(**options))):
        sampler.admit(slot, params, np.array([2]))
        alone.admit(slot, params, np.array([2]))
    result = sampler.sample(logits, np.array([0, 1]), np.array([0, 0]))
    assert result.finite.tolist() == [False, True]
    assert result.token_ids[1] == sample_one(alone, logits[1], slot=1)
    assert sampler._slots[0].num_sampled == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [1e-5, 1e5])
def test_the_extreme_temperatures_choose(temperature: float) -> None:
    sampler, row = make(), random_logits(1, scale=1e30)[0]
    sampler.admit(0, SamplingParams(temperature=temperature, top_p=1e-300, min_p=1.0, seed=3), np.array([2]))
    assert sample_one(sampler, row) == int(row.argmax())


# ---- processors against Hugging Face ------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2, "temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.3, "top_p": 0.5, "min_p": 0.3},
    ],
)
def test_the_same_ids_survive_as_in_hf(options: dict[str, float]) -> None:
    """HF's own processors, in its order, leave exactly the ids that we can draw."""
    import torch
    from transformers.generation import logits_process as hf

    row, prompt = random_logits(1, scale=2.0)[0], np.array([3, 5, 9, 9, 60])
    scores = torch.from_numpy(row.copy())[None]
    ids = torch.from_numpy(prompt)[None]
    chain = [
        hf.RepetitionPenaltyLogitsProcessor(float(options.get("repetition_penalty", 1.0))),
        hf.TemperatureLogitsWarper(float(options.get("temperature", 1.0))),
    ]
    chain += [hf.TopKLogitsWarper(int(options["top_k"]))] if "top_k" in options else []
    chain += [hf.TopPLogitsWarper(options["top_p"])] if "top_p" in options else []
    chain += [hf.MinPLogitsWarper(options["min_p"])] if "min_p" in options else []
    for processor in chain:
        scores = processor(ids, scores)
    probabilities = torch.softmax(scores[0], -1).numpy()
    drawn: Counter[int] = Counter()
    sampler = make()
    sampler.admit(0, SamplingParams(seed=11, **options), prompt)  # type: ignore[arg-type]
    state = sampler._slots[0]
    assert state is not None
    before = None if state.seen is None else state.seen.copy()
    for position in range(DRAWS):
        if before is not None and state.seen is not None:
            state.seen[:] = before  # every draw from the same state
        drawn[sample_one(sampler, row, position)] += 1
    assert set(drawn) <= set(np.flatnonzero(probabilities > 0).tolist())
    assert set(np.flatnonzero(probabilities > 0.01).tolist()) <= set(drawn)
    assert chi_square(drawn, probabilities, DRAWS) < 3.0


def chi_square(drawn: Counter[int], probabilities: np.ndarray, draws: int) -> float:
    """Per degree of freedom; ids expected fewer than five times are pooled."""
    likely = np.flatnonzero(probabilities * draws >= 5)
    expected = probabilities[likely] * draws
    seen = np.array([drawn[int(i)] for i in likely], dtype=float)
    rest_expected, rest_seen = draws - expected.sum(), draws - seen.sum()
    total = float(((seen - expected) ** 2 / expected).sum())
    if rest_expected > 1:
        total += float((rest_seen - rest_expected) ** 2 / rest_expected)
    return total / max(len(likely), 1)


def test_penalties_count_the_output_as_it_grows() -> None:
    """vLLM's meaning: frequency per occurrence, presence once, both over the output only."""
    row = np.zeros(V, dtype=np.float32)
    row[[10, 11, 12]] = [3.0, 2.9, 2.0]
    prompt = np.array([10, 10, 11])

    def greedy(count: int, **options: float) -> list[int]:
        sampler = make()
        sampler.admit(0, SamplingParams(temperature=0, **options), prompt)  # type: ignore[arg-type]
        return [sample_one(sampler, row, p) for p in range(count)]

    assert greedy(5) == [10] * 5
    assert greedy(5, presence_penalty=0.5) == [10, 11, 10, 10, 10]
    assert greedy(6, frequency_penalty=0.5) == [10, 11, 10, 11, 10, 12]
    assert greedy(3, repetition_penalty=2.0) == [12, 10, 10]


def test_negative_logits_are_penalized_downwards() -> None:
    row = np.full(V, -9.0, dtype=np.float32)
    row[[10, 11]] = [-1.0, -1.5]
    sampler = make()
    sampler.admit(0, SamplingParams(temperature=0, repetition_penalty=2.0), np.array([10]))
    assert sample_one(sampler, row) == 11


def test_min_tokens_masks_eos_and_stop_ids() -> None:
    row = np.zeros(V, dtype=np.float32)
    row[[EOS, 20, 30]] = [9, 8, 7]
    sampler = make()
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(20,))
    sampler.admit(0, params, np.array([2]))
    assert [sample_one(sampler, row, p) for p in range(4)] == [30, 30, EOS, EOS]
    sampler.admit(0, SamplingParams(temperature=0, min_tokens=2, ignore_eos=True), np.array([2]))
    assert sample_one(sampler, row) == EOS, "ignored EOS ids are ids like any other"


def test_the_input_is_not_modified_and_may_be_strided() -> None:
    wide = np.zeros((3, 2 * V), dtype=np.float32)
    wide[:, :V] = random_logits(3)
    logits, before = wide[:, :V], wide.copy()
    sampler = make()
    params = SamplingParams(repetition_penalty=1.5, min_tokens=3, top_k=5, top_p=0.9, seed=3, logprobs=2)
    for slot in range(3):
        sampler.admit(slot, params, np.array([4]))
    strided = sampler.sample(logits, np.arange(3), np.arange(3))
    assert (wide == before).all()
    for slot in range(3):
        sampler.admit(slot, params, np.array([4]))
    dense = sampler.sample(np.ascontiguousarray(logits), np.arange(3), np.arange(3))
    assert strided.token_ids.tolist() == dense.token_ids.tolist()


# ---- the draw -----------------------------------------------------------------------------


def test_weights_are_exponentials() -> None:
    z = -np.concatenate([np.linspace(0, 20, 50_001), [25.0, 1e30, np.inf]]).astype(np.float32)
    w = weights_of(z)
    exact = np.exp(z.astype(np.float64)) * 2**30
    assert w[0] == 2**30
    assert (np.abs(w - exact) <= exact * 3e-6 + 1).all()
    assert (np.diff(w) <= 0).all()
    assert w[-2:].tolist() == [0, 0]


@given(
    logits=st.lists(st.integers(-6, 6), min_size=2, max_size=40),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    word=st.integers(0, 2**64 - 1),
)
def test_a_choice_is_what_the_specification_says(
    logits: list[int], top_k: int, top_p: float, min_p: float, word: int
) -> None:
    """Against the five lines of the module's docstring, written out one id at a time; ties included."""
    row = np.array(logits, dtype=np.float32) * np.float32(0.5)
    z = ((row - row.max()) / np.float32(0.8)).tolist()
    w = weights_of(np.array(z, dtype=np.float32)).tolist()
    left = list(range(len(z)))
    if top_k:
        border = sorted(z, reverse=True)[min(top_k, len(z)) - 1]
        left = [i for i in left if z[i] >= border]
    total = sum(w[i] for i in left)
    if top_p < 1:
        left = [i for i in left if sum(w[j] for j in left if z[j] > z[i]) < top_p * total]
    left = [i for i in left if w[i] >= min_p * max(w[j] for j in left)]
    target = (word * sum(w[i] for i in left)) >> 64
    running = 0
    for i in left:
        running += w[i]
        if running > target:
            break
    assert choose_id(row, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, word=word) == i


def test_filters_run_in_their_order() -> None:
    """Top-p counts the mass that top-k left, so both together keep fewer than top-p alone."""
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    assert support(row, top_p=0.75) == {0, 1, 2}
    assert support(row, top_k=2, top_p=0.75) == {0, 1}
    assert support(row, top_k=2, top_p=0.55) == {0}
    assert support(row, min_p=0.6) == {0, 1}
    assert support(row, temperature=0.5, min_p=0.6) == {0}, "temperature comes before min-p"


def test_tiny_temperatures_neither_overflow_nor_warn() -> None:
    row = random_logits(1, scale=1e4)[0]
    with np.errstate(all="raise"):
        chosen = choose_id(row, temperature=1e-6, top_k=0, top_p=0.9, min_p=0.0, word=2**63)
    assert chosen == row.argmax()


def test_ids_do_not_depend_on_company_or_slot() -> None:
    logits = random_logits(12, seed=5)
    options = [
        SamplingParams(seed=7, temperature=1.3, top_p=0.9),
        SamplingParams(seed=7, frequency_penalty=0.8),
        SamplingParams(temperature=0, repetition_penalty=1.4),
    ]

    def run(order: list[int], slots: list[int]) -> dict[int, list[int]]:
        sampler, out = make(), {i: [] for i in order}
        for i in order:
            sampler.admit(slots[i], options[i], np.array([i + 2]))
        for step in range(4):
            rows = np.stack([logits[3 * step + i] for i in order])
            ids = sampler.sample(rows, np.array([slots[i] for i in order]), np.full(len(order), step))
            for i, token in zip(order, ids.token_ids.tolist(), strict=True):
                out[i].append(token)
        return out

    together, reordered = run([0, 1, 2], [0, 1, 2]), run([2, 0, 1], [3, 0, 2])
    alone = {i: run([i], [1, 1, 1])[i] for i in range(3)}
    assert together == reordered == alone
    assert together[0] != together[1]


def test_seeds_and_positions_change_draws() -> None:
    row = np.zeros(V, dtype=np.float32)

    def draws(seed: int | None) -> list[int]:
        sampler = make()
        sampler.admit(0, SamplingParams(seed=seed), np.array([2]))
        return [sample_one(sampler, row, p) for p in range(20)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert draws(None) != draws(None)
    assert len(set(draws(1))) > 8


# ---- logprobs -----------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution() -> None:
    row = random_logits(1, seed=2)[0]
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    order = np.argsort(-row, kind="stable")
    sampler = make()
    params = SamplingParams(seed=4, temperature=9.0, top_k=30, repetition_penalty=1.5, logprobs=3)
    sampler.admit(0, params, order[:3])
    result: SampleResult = sampler.sample(row[None], np.array([0]), np.array([5]))
    token, reported = int(result.token_ids[0]), result.logprobs[0]
    assert reported is not None
    assert next(iter(reported)) == token
    assert set(reported) == {token, *order[:3].tolist()}
    for i, entry in reported.items():
        assert entry.logprob == pytest.approx(exact[i], abs=1e-5)
        assert entry.rank == order.tolist().index(i) + 1


def test_logprobs_are_given_only_where_asked() -> None:
    sampler, logits = make(), random_logits(2)
    sampler.admit(0, SamplingParams(temperature=0), np.array([2]))
    sampler.admit(1, SamplingParams(temperature=0, logprobs=0), np.array([2]))
    result = sampler.sample(logits, np.array([0, 1]), np.array([0, 0]))
    assert result.logprobs[0] is None
    assert list(result.logprobs[1] or ()) == [int(result.token_ids[1])]


def test_misuse_is_refused() -> None:
    sampler = make()
    with pytest.raises(UsageError, match="slot 2"):
        sampler.sample(random_logits(1), np.array([2]), np.array([0]))
    with pytest.raises(UsageError, match="expected float32"):
        sampler.sample(random_logits(1)[:, :10], np.array([0]), np.array([0]))
