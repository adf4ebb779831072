"""The running requests as arrays by slot: what planning and reading a step touch of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapeout.runtime.scheduler.plan import StepPlan
from tapeout.runtime.scheduler.request import Request


class Running:
    """The requests that hold a slot and have not ended.

    Every step plans and reads every one of them. Object by object that would be most of the host's
    time, so the numbers lie in arrays, and a step in which nobody ends runs no code per request.

    What is *planned* runs ahead of what is *read* by up to one step: the planner counts tokens whose
    ids the host has not seen yet. A slot keeps its numbers until another request gets it: a submitted
    step may still use the slot of a request that has ended.

    Args:
        num_slots: requests that can run at a time.
        max_output_tokens: most ids one of them can come to have.

    Attributes ([num_slots]; a row of a slot that nobody ever had means nothing):
        context_tokens: tokens it reads before it samples: its prompt, and what it had when paused.
        prompt_tokens, max_tokens, worst_case_tokens: the request's, fixed.
        cached_tokens: tokens in the KV cache after all submitted steps.
        turn_tokens: cached tokens from which on it does not simply generate: 0 while it reads context, then
            the number with which its last token has been planned.
        output_tokens: output tokens read.
        resumed_tokens: output tokens it had when it was admitted; more of them show that all its context
            has been computed.
        last_step: index of the last submitted step it is part of, -1 before.
        alive: it has not ended, so ids that are read for it are its own.
        planned: it takes part in planning: it has neither ended nor been paused.
        look_at: output tokens with which something happens to the request whatever the ids are: its
            first one, its last one, any one where it is watched.
        output_ids: [num_slots, max_output_tokens], the ids read.
        requests: who runs, None where nobody does.
    """

    def __init__(self, *, num_slots: int, max_output_tokens: int) -> None:
        def numbers() -> np.ndarray:
            return np.zeros(num_slots, np.int32)

        self.context_tokens, self.max_tokens, self.worst_case_tokens = numbers(), numbers(), numbers()
        self.prompt_tokens = numbers()
        self.cached_tokens, self.turn_tokens, self.output_tokens = numbers(), numbers(), numbers()
        self.resumed_tokens = numbers()
        self.last_step = np.full(num_slots, -1, np.int64)
        self.alive, self.planned = np.zeros(num_slots, bool), np.zeros(num_slots, bool)
        self.look_at = numbers()
        # Never cleared and mostly never touched: the system gives memory for what is written only.
        self.output_ids = np.empty((num_slots, max_output_tokens), np.int32)
        self._flat_ids = self.output_ids.reshape(-1)
        self.requests: list[Request | None] = [None] * num_slots
        self._names = [""] * num_slots
        self._names_are_shared = False
        self._by_id: dict[str, Request] = {}
        self._order = np.zeros(0, np.int64)
        self._arrivals, self._numbers = (np.zeros(num_slots, np.int64) for _ in range(2))  # their ranks
        self._came: list[int] = []  # slots that are not in the array yet
        self._came_in_order = True  # each after all others by rank
        self._last_rank = (-(2**62), -1)  # nobody in the order or on the way there has a higher one
        self._some_left = False  # slots in it belong to requests that have ended or were paused
        # How many requests an id can end. The last entry stays 0: it stands for all larger ids.
        self._ended_by = np.zeros(1, np.int32)

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def names(self) -> list[str]:
        """Request ids in order of admission."""
        return list(self._by_id)

    @property
    def order(self) -> np.ndarray:
        """int64 [B]: slots of those that take part in planning, by rank."""
        if self._came:
            order = np.concatenate([self._order, np.array(self._came, np.int64)])
            if not self._came_in_order:  # priorities, or a resumed request
                order = order[self.turns(order)]
            self._order, self._came, self._came_in_order = order, [], True
        if self._some_left:
            self._order = self._order[self.planned[self._order]]
            self._some_left = False
        return self._order

    def turns(self, slots: np.ndarray) -> np.ndarray:
        """int64 [B]: indices into `slots` that put them in the order of their ranks."""
        turns: np.ndarray = np.lexsort((self._numbers[slots], self._arrivals[slots]))
        return turns

    def names_by_slot(self) -> Sequence[str]:
        """Request ids as they are now, also of requests that have ended. Whoever has the list may keep it: it
        does not change any more."""
        self._names_are_shared = True
        return self._names

    def planned_tokens(self, slots: np.ndarray) -> np.ndarray:
        """int32 [B]: output tokens sampled by all submitted steps."""
        cached = self.cached_tokens[slots]
        in_context = cached < self.context_tokens[slots]
        output = cached - self.prompt_tokens[slots] + 1
        planned: np.ndarray = np.where(in_context, self.resumed_tokens[slots], output)
        return planned

    def request(self, slot: int) -> Request:
        """Who runs in the slot."""
        found = self.requests[slot]
        assert found is not None, f"nobody runs in slot {slot}"
        return found

    def requests_in(self, slots: np.ndarray) -> list[Request]:
        """[B]: the same for several slots."""
        requests = self.requests
        found = [request for slot in slots.tolist() if (request := requests[slot]) is not None]
        assert len(found) == len(slots), "nobody runs in some slot"
        return found

    def add(self, request: Request) -> None:
        """A request was given its slot; one that was paused goes on after the ids it had."""
        slot, had = request.slot, len(request.output_token_ids)
        if self._some_left:
            self._order = self.order  # the slot may have been that of one who left: not twice
        self.context_tokens[slot], self.max_tokens[slot] = request.context_tokens, request.max_tokens
        self.worst_case_tokens[slot] = request.worst_case_tokens
        self.prompt_tokens[slot] = request.prompt_tokens
        self.cached_tokens[slot] = request.cache.attached_tokens
        self.turn_tokens[slot] = 0
        self.resumed_tokens[slot] = self.output_tokens[slot] = had
        self.last_step[slot] = -1
        self.alive[slot] = self.planned[slot] = True
        self.look_at[slot] = 1
        if had:
            self.output_ids[slot, :had] = request.output_token_ids
            self.looked_at(request)
        self.requests[slot] = self._by_id[request.request_id] = request
        if self._names_are_shared:
            self._names, self._names_are_shared = self._names.copy(), False
        self._names[slot] = request.request_id
        self._arrivals[slot], self._numbers[slot] = request.rank
        self._came.append(slot)
        if request.rank > self._last_rank:
            self._last_rank = request.rank
        else:
            self._came_in_order = False
        if request.ending_ids:
            self._count_ending_ids(request, 1)

    def advance(self, plan: StepPlan) -> None:
        """The step was planned for good: its tokens count as cached."""
        self.cached_tokens[plan.slots] = plan.ends
        if plan.num_context:
            done = plan.slots[: plan.num_context]
            if np.count_nonzero(plan.context_codes):
                done = done[plan.samples[: plan.num_context]]
            self.turn_tokens[done] = self.worst_case_tokens[done] - 1

    def remove(self, request: Request) -> None:
        """A running request has ended or given up its slot; nothing happens for one that never ran."""
        if self._by_id.pop(request.request_id, None) is not None:
            slot = request.slot
            self.alive[slot] = self.planned[slot] = False
            self.requests[slot], self._some_left = None, True
            if request.ending_ids:
                self._count_ending_ids(request, -1)

    def pause(self, slots: np.ndarray) -> None:
        """They take part in no further step. They may be in one whose ids are still to be read."""
        self.planned[slots] = False
        self._some_left = True

    def has_sampled(self, slot: int) -> bool:
        """A token has been read for the slot's request since it was admitted."""
        sampled: bool = self.output_tokens.item(slot) > self.resumed_tokens.item(slot)
        return sampled

    def have_sampled(self, slots: np.ndarray) -> np.ndarray:
        """bool [S]: the same for several slots."""
        sampled: np.ndarray = self.output_tokens[slots] > self.resumed_tokens[slots]
        return sampled

    def known_tokens(self, slots: np.ndarray) -> np.ndarray:
        """int32 [S]: prompt and ids read but for the last one, which has not been, or may not have
        been, in a step that was read. Of those that have sampled since they were admitted."""
        known: np.ndarray = self.prompt_tokens[slots] + self.output_tokens[slots] - 1
        return known

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """One id was read for each of these slots: which of them have to be looked at now, as indices.

        The others go on, and nothing about them changes but their numbers.
        """
        counts = self.output_tokens[slots]
        # One index into the flat array: NumPy takes half as long as with two.
        self._flat_ids[slots * self.output_ids.shape[1] + counts] = token_ids
        counts += 1
        self.output_tokens[slots] = counts
        wanted = counts >= self.look_at[slots]
        if len(self._ended_by) > 1:
            wanted |= self._ended_by.take(token_ids, mode="clip") > 0
        return wanted.nonzero()[0]

    def ids_from(self, slot: int, start: int) -> list[int]:
        """The ids read for a slot, without the first `start`."""
        ids: list[int] = self.output_ids[slot, start : self.output_tokens.item(slot)].tolist()
        return ids

    def token_ids(self, request: Request, start: int, end: int) -> np.ndarray:
        """int32: prompt and ids read, at these positions."""
        prompt, output = request.prompt_token_ids, self.output_ids[request.slot]
        count = len(prompt)
        if end <= count:
            return prompt[start:end]
        if start >= count:
            return output[start - count : end - count]
        return np.concatenate((prompt[start:], output[: end - count]))

    def looked_at(self, request: Request) -> None:
        """The request's newest token has been dealt with and did not end it."""
        if not request.watched:
            self.look_at[request.slot] = request.max_tokens

    def _count_ending_ids(self, request: Request, change: int) -> None:
        for token_id in request.ending_ids:
            if token_id >= len(self._ended_by) - 1:
                self._ended_by.resize(token_id + 2, refcheck=False)
            self._ended_by[token_id] += change
