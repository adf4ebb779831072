"""The sampler of the CPU target and the reference of every other: numpy, row by row.

A slot is the sampling state of one running request: its parameters, its seed, how many ids it
has drawn, and, only where penalties ask for it, counts of the ids seen. Nothing a row returns
depends on the other rows of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.choose import choose_id
from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.philox import draw_u64
from tapeout.plugins.sample.result import Logprob, SampleResult, ranked_logprobs

logger = logging.getLogger("tapeout")


def ending_ids(params: SamplingParams, eos: Iterable[int], vocab_size: int) -> np.ndarray:
    """Ids int64 that `min_tokens` masks, ascending: those that end the output."""
    ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    return np.array(sorted(i for i in ending if i < vocab_size), dtype=np.int64)


class _Slot:
    """Sampling state of one request."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: np.ndarray,
        output: np.ndarray,
        eos: Iterable[int],
        vocab: int,
    ) -> None:
        self.params = params.with_seed()
        self.seed = self.params.seed or 0
        self.num_sampled = len(output)
        self.ending_ids = ending_ids(params, eos, vocab)
        self.counts: np.ndarray | None = None  # [vocab] occurrences in the output
        self.seen: np.ndarray | None = None  # [vocab] in prompt or output
        if params.has_penalties:
            self.counts = np.zeros(vocab, dtype=np.int32)
            self.seen = np.zeros(vocab, dtype=bool)
            self.seen[prompt[prompt < vocab]] = True
            self.seen[output] = True
            np.add.at(self.counts, output, 1)

    def record(self, token_id: int) -> None:
        self.num_sampled += 1
        if self.counts is not None and self.seen is not None:
            self.counts[token_id] += 1
            self.seen[token_id] = True


class Sampler:
    """Samples ids for the rows of a step.

    Args:
        max_batch_size: number of slots.
        vocab_size: logit width V.
        valid_vocab_size: ids the tokenizer knows; larger ones are never sampled.
        eos_token_ids: masked while a request is below its `min_tokens`.
    """

    def __init__(
        self, max_batch_size: int, vocab_size: int, valid_vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.vocab_size = vocab_size
        self.valid_vocab_size = min(valid_vocab_size, vocab_size)
        self.eos_token_ids = eos_token_ids
        self._slots: list[_Slot | None] = [None] * max_batch_size

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: np.ndarray,
        output_token_ids: Sequence[int] | np.ndarray = (),
    ) -> None:
        """Bind a slot to a request; the previous one's state is dropped.

        `output_token_ids`: sampled already, in another slot.
        """
        prompt = np.asarray(prompt_token_ids, dtype=np.int64)
        output = np.asarray(output_token_ids, dtype=np.int64)
        self._slots[slot] = _Slot(params, prompt, output, self.eos_token_ids, self.valid_vocab_size)

    def sample(self, logits: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> SampleResult:
        """One id per row; advances the slots' state.

        Args:
            logits: [R, V] float32, rows may be strided; never modified.
            slots: [R], each at most once. positions: [R] of the rows' input tokens, key of the draw.

        A row for which no id can be chosen is not `finite` in the result; the others are not touched.
        """
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size or logits.dtype != np.float32:
            raise UsageError(
                f"logits are {logits.dtype} {logits.shape}, expected float32 [R, {self.vocab_size}]"
            )
        rows = len(slots)
        token_ids = np.zeros(rows, dtype=np.int32)
        finite = np.ones(rows, dtype=bool)
        logprobs: list[dict[int, Logprob] | None] = [None] * rows
        states = [self._state(int(slot)) for slot in slots]
        words = self._words(states, positions)
        for r, state in enumerate(states):
            row = logits[r]
            best = int(row.argmax())
            # argmax stops at a NaN and at +inf, so with the minimum every bad value is caught.
            if not (np.isfinite(row[best]) and np.isfinite(row.min())):
                finite[r] = False
                continue
            try:
                token_id = self._choose(row, best, state, int(words[r]))
                if state.params.logprobs is not None:
                    logprobs[r] = top_logprobs(row, token_id, state.params.logprobs)
            except Exception:
                # The step's other rows belong to other requests.
                logger.exception("slot %d: no id can be chosen with %s", slots[r], state.params)
                finite[r] = False
                continue
            token_ids[r] = token_id
            state.record(token_id)
        return SampleResult(token_ids, tuple(logprobs), finite)

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        if state is None:
            raise UsageError(f"slot {slot} has no request", hint="call admit before sampling a slot")
        return state

    @staticmethod
    def _words(states: list[_Slot], positions: np.ndarray) -> np.ndarray:
        if all(s.params.greedy for s in states):
            return np.zeros(len(states), dtype=np.uint64)
        return draw_u64(np.array([s.seed for s in states], dtype=np.uint64), np.asarray(positions))

    def _choose(self, row: np.ndarray, best: int, state: _Slot, word: int) -> int:
        params = state.params
        below_min = state.num_sampled < params.min_tokens and len(state.ending_ids) > 0
        if params.greedy and not params.has_penalties and not below_min and best < self.valid_vocab_size:
            return best
        scores = row[: self.valid_vocab_size]
        if params.has_penalties or below_min:
            scores = np.array(scores, dtype=np.float32)
            penalize(scores, params, state.counts, state.seen)
            if below_min:
                scores[state.ending_ids] = -np.inf
            if not np.isfinite(highest := scores.max()):
                raise ArithmeticError(f"the largest score after penalties and masks is {highest}")
        if params.greedy:
            return int(scores.argmax())
        return choose_id(
            scores,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            word=word,
        )


def penalize(
    scores: np.ndarray, params: SamplingParams, counts: np.ndarray | None, seen: np.ndarray | None
) -> None:
    """Apply the three penalties to scores [V] float32 in place (vLLM's order and meaning).

    Repetition divides positive and multiplies negative logits of ids in prompt or output;
    frequency subtracts per occurrence in the output; presence subtracts once.
    """
    if counts is None or seen is None:
        return
    with np.errstate(over="ignore"):  # the caller looks for infinities
        _penalize(scores, params, counts, seen)


def _penalize(scores: np.ndarray, params: SamplingParams, counts: np.ndarray, seen: np.ndarray) -> None:
    if params.repetition_penalty != 1.0:
        ids = np.flatnonzero(seen)
        factor = np.float32(params.repetition_penalty)
        values = scores[ids]
        scores[ids] = np.where(values > 0, values / factor, values * factor)
    ids = np.flatnonzero(counts)
    if params.frequency_penalty != 0.0:
        scores[ids] -= np.float32(params.frequency_penalty) * counts[ids].astype(np.float32)
    if params.presence_penalty != 0.0:
        scores[ids] -= np.float32(params.presence_penalty)


def top_logprobs(row: np.ndarray, token_id: int, top_n: int) -> dict[int, Logprob]:
    """Log softmax of one row of raw logits [V]: the sampled id first, then the top_n in rank order."""
    highest = row.max()
    log_total = float(highest) + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))
    value = row[token_id]
    rank = int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value)) + 1
    ids = np.zeros(0, np.int64)
    if top_n > 0:
        top_n = min(top_n, len(row))
        border = np.partition(row, len(row) - top_n)[len(row) - top_n]
        ids = np.flatnonzero(row >= border)
        ids = ids[np.argsort(-row[ids], kind="stable")][:top_n]
    top = zip(ids.tolist(), row[ids].tolist(), strict=True)
    return ranked_logprobs(token_id, float(value), rank, top, log_total)
