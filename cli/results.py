"""Results of `tapeout run`: as text, as JSON lines, and their figures."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

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
        "usage": {"prompt_tokens": metrics.prompt_tokens, "completion_tokens": metrics.output_tokens},
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
    stream.write(json.dumps(data, ensure_ascii=False) + "\n")


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
    """Standard output for None; else a file that has its name only once it is complete."""
    if path is None:
        yield sys.stdout
        return
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes private files; a result has the mode that the user's umask gives any file.
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
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
    lines.append(f"tokens: {prompt_tokens} prompt, {output_tokens} output in {run_seconds:.2f} s")
    if run_seconds > 0:
        lines.append(f"throughput: {output_tokens / run_seconds:.1f} tokens/s")
    if speeds:
        lines.append(f"decode: {sum(speeds) / len(speeds):.1f} tokens/s for each request")
    return lines
