"""Drives an `LLM` for `tapeout run`: all requests in flight at once, results in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tapeout.plugins.errors import UsageError

if TYPE_CHECKING:
    from tapeout.cli.requests import Request
    from tapeout.runtime import LLM, RequestOutput

#: Called with the index of the request and its new text, while it is the first unfinished one.
OnText = Callable[[int, str], None]


class Generation:
    """Runs requests and keeps what they have produced, also when it is interrupted.

    Streams are used for batches too: all are queued before the first is read, so they share steps,
    and unlike `LLM.generate` they leave what was generated before Ctrl-C.

    Attributes:
        outputs: results of the first requests, in order; complete but for the last one while it runs.
    """

    def __init__(self, llm: LLM, requests: Sequence[Request]) -> None:
        """Queue all requests.

        Raises:
            UsageError: naming every request that can never run; none was run.
        """
        self.outputs: list[RequestOutput] = []
        self._streams: list[Iterator[RequestOutput]] = []
        problems = []
        for number, request in enumerate(requests, 1):
            try:
                self._streams.append(
                    llm.stream(
                        _prompt(llm, request), request.params, priority=request.priority, **request.cache
                    )
                )
            except UsageError as error:
                label = f"prompt {number}" if len(requests) > 1 else "prompt"
                problems += _labelled(error, request.place or label)
        if problems:
            raise UsageError(
                "\n".join(problems), hint="nothing was run; `tapeout inspect ENGINE` shows its limits"
            )

    def run(self, on_text: OnText) -> Iterator[tuple[int, RequestOutput]]:
        """Yield index and complete result of each request, in order, as soon as it is there."""
        for index, stream in enumerate(self._streams):
            for delta in stream:
                if len(self.outputs) == index:
                    self.outputs.append(delta)
                else:
                    self.outputs[index] = _joined(self.outputs[index], delta)
                if text := delta.outputs[0].text:
                    on_text(index, text)
            yield index, self.outputs[index]


def _prompt(llm: LLM, request: Request) -> Any:
    if request.messages is not None:
        return llm.chat_prompt(request.messages)
    if request.prompt_token_ids is not None:
        return {"prompt_token_ids": list(request.prompt_token_ids)}
    return request.prompt


def _labelled(error: UsageError, label: str) -> list[str]:
    """The lines of an error about a single prompt, which the LLM calls prompt 0, under `label`."""
    lines = [line.strip() for line in error.message.splitlines() if not line.endswith(":")]
    return [f"{label}: " + line.removeprefix("prompt 0: ") for line in lines]


def _joined(before: RequestOutput, delta: RequestOutput) -> RequestOutput:
    """Everything of a request so far and what came now, as one result."""
    old, new = before.outputs[0], delta.outputs[0]
    logprobs = None if new.logprobs is None else (old.logprobs or ()) + new.logprobs
    cumulative = None
    if new.cumulative_logprob is not None:
        cumulative = (old.cumulative_logprob or 0.0) + new.cumulative_logprob
    completion = replace(
        new,
        text=old.text + new.text,
        token_ids=old.token_ids + new.token_ids,
        logprobs=logprobs,
        cumulative_logprob=cumulative,
    )
    return replace(delta, outputs=(completion,))
