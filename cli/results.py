"""Results of `tapeout run`: as text, as JSON lines, and their figures."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tapeout.cli.paths import final_target, is_special, own_descriptor, temporary_beside
from tapeout.cli.streams import standard_output, writing

if TYPE_CHECKING:
    from tapeout.plugins.sample.result import Logprob
    from tapeout.runtime.output import CompletionOutput, RequestOutput


def result_object(output: RequestOutput, user_id: Any, prompt: str | None) -> dict[str, Any]:
    """One result as JSON data.

    `id` and `prompt` are left out where the request had none; `logprobs` where none were asked for.
    """
    completion, metrics = output.outputs[0], output.metrics
    ttft = None if metrics.first_token_time is None else metrics.first_token_time - metrics.arrival_time
    data: dict[str, Any] = {} if user_id is None else {"id": user_id}
    if prompt is not None:
        data["prompt"] = prompt
    data |= {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": output.seed,
        "usage": {
            "prompt_tokens": metrics.prompt_tokens,
            "completion_tokens": metrics.output_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
        },
        "metrics": {
            "time_to_first_token_seconds": ttft,
            "queue_seconds": metrics.queue_seconds,
            "prefill_seconds": metrics.prefill_seconds,
            "decode_seconds": metrics.decode_seconds,
        },
    }
    if completion.logprobs is not None:
        data["logprobs"] = [_logprobs(token) for token in completion.logprobs]
        data["cumulative_logprob"] = completion.cumulative_logprob
    return data


def _logprobs(token: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": lp.logprob, "rank": lp.rank, "decoded_token": lp.decoded_token}
        for token_id, lp in token.items()
    }


def write_json_line(stream: IO[str], data: Mapping[str, Any]) -> None:
    """One line of JSON; characters outside ASCII are escaped where the stream's encoding may lack them."""
    utf8 = str(getattr(stream, "encoding", None) or "").lower().replace("_", "-") in ("utf-8", "utf8")
    stream.write(json.dumps(data, ensure_ascii=not utf8) + "\n")


def logprob_lines(completion: CompletionOutput) -> list[str]:
    """A line for each token: what was sampled and the alternatives, most likely first."""
    lines = []
    for token_id, token in zip(completion.token_ids, completion.logprobs or (), strict=False):
        ranked = sorted(token.items(), key=lambda item: item[1].rank)
        others = [f"{_quoted(i, lp)} {lp.logprob:.3f}" for i, lp in ranked if i != token_id]
        chosen = token[token_id]
        lines.append(f"{_quoted(token_id, chosen)} {chosen.logprob:.3f}" + "".join(f"  {o}" for o in others))
    return lines


def _quoted(token_id: int, logprob: Logprob) -> str:
    return (
        str(token_id)
        if logprob.decoded_token is None
        else json.dumps(logprob.decoded_token, ensure_ascii=False)
    )


@contextlib.contextmanager
def open_output(path: Path | None) -> Iterator[IO[str]]:
    """Standard output for None; else a file that has its name only once it is complete.

    A device, FIFO or `/proc/self/fd/N` is written to as it is; of links, the file they lead to.

    Raises:
        TapeoutError: it takes no more, for example because the disk is full.
    """
    if path is None:
        with writing():
            yield standard_output()
        return
    with writing(f"--output: {str(path)!r}"):
        target = final_target(path)
        if own_descriptor(target) is not None or (target.exists() and is_special(target.stat())):
            with _opened_as_it_is(target) as stream:
                yield stream
        else:
            with _replaced(target) as stream:
                yield stream


def _opened_as_it_is(target: Path) -> IO[str]:
    number = own_descriptor(target)
    # Not O_CREAT: what was a device when it was looked at is not to become a file.
    handle = os.open(target, os.O_WRONLY) if number is None else os.dup(number)
    return os.fdopen(handle, "w", encoding="utf-8")


@contextlib.contextmanager
def _replaced(target: Path) -> Iterator[IO[str]]:
    temporary = temporary_beside(target)
    try:
        with temporary.open("x", encoding="utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def stats_lines(outputs: Sequence[RequestOutput], load_seconds: float, run_seconds: float) -> list[str]:
    """What `--stats` prints. Decode speed is the mean over requests of tokens after the first."""
    metrics = [output.metrics for output in outputs]
    prompt_tokens = sum(m.prompt_tokens for m in metrics)
    output_tokens = sum(m.output_tokens for m in metrics)
    first = sorted(m.first_token_time - m.arrival_time for m in metrics if m.first_token_time is not None)
    decoding = [m for m in metrics if m.decode_seconds and m.output_tokens > 1]
    speeds = [(m.output_tokens - 1) / m.decode_seconds for m in decoding if m.decode_seconds]
    lines = [f"load: {load_seconds:.2f} s"]
    if first:
        name = "time to first token" if len(first) == 1 else f"time to first token, median of {len(first)}"
        lines.append(f"{name}: {first[len(first) // 2] * 1e3:.1f} ms")
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    of_prompts = f"{prompt_tokens} prompt" + (f" ({cached} of them cached)" if cached else "")
    lines.append(f"tokens: {of_prompts}, {output_tokens} output in {run_seconds:.2f} s")
    if run_seconds > 0:
        lines.append(f"throughput: {output_tokens / run_seconds:.1f} tokens/s")
    if speeds:
        lines.append(f"decode: {sum(speeds) / len(speeds):.1f} tokens/s for each request")
    return lines
