"""Walks the two limits a running engine may be given, to the knee of throughput against latency.

The knee is the point of the largest *power*, throughput over time for each token (Kleinrock): below it more
requests in flight raise throughput faster than they slow each request, above it they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.plugins.errors import UsageError
from tapeout.runtime.bench.measured_llm import BenchRequest, MeasuredLLM
from tapeout.runtime.bench.metrics import throughput_metrics
from tapeout.runtime.engine.manifest import Limits

KNEE = "the point with the largest output_throughput / median TPOT (power): tokens a second, squared"
#: A walk ends after so many points in a row that are worse than its best.
_PATIENCE = 2
#: Fewer tokens a step than this only cut prompts into more steps.
_LEAST_NUM_TOKENS = 64


@dataclass(frozen=True)
class Sweep:
    """What to walk. None = powers of two up to the engine's limit, as far as the knee."""

    batch_sizes: Sequence[int] | None
    num_tokens: Sequence[int] | None
    requests_per_slot: int
    #: Makes so many requests, new ones for each point (its number is the second argument).
    requests: Callable[[int, int], list[BenchRequest]]


def check_sweep(sweep: Sweep, limits: Limits, input_len: int, output_len: int, range_ratio: float) -> None:
    """UsageError naming every limit above the engine's, and requests that would be too long for it."""
    problems = [
        f"{name} {value}, the engine's limit is {most}"
        for name, values, most in (
            ("batch size", sweep.batch_sizes, limits.max_batch_size),
            ("tokens a step", sweep.num_tokens, limits.max_num_tokens),
        )
        for value in values or ()
        if value > most
    ]
    longest = int(input_len * (1 + range_ratio)) + int(output_len * (1 + range_ratio))
    if longest > limits.max_seq_len:
        problems.append(f"requests of up to {longest} tokens, max_seq_len is {limits.max_seq_len}")
    if problems:
        raise UsageError(
            "the engine cannot run:\n" + "\n".join(f"  {p}" for p in problems),
            hint="give lower numbers, or build an engine with higher limits",
        )


def doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... and last."""
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last]


def walk(llm: MeasuredLLM, sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measure point after point: batch sizes first, then, at the best of them, tokens a step.

    With both given, every combination. A point is the engine's limits it was run with, `power` and the
    figures of `throughput_metrics`; it is measured after a run of a batch that is not counted.
    """
    limits = llm.engine.manifest.limits
    points: list[dict[str, Any]] = []

    def measure(batch: int, tokens: int) -> dict[str, Any]:
        points.append(_measure(llm, sweep, batch, tokens, len(points)))
        return points[-1]

    if sweep.batch_sizes is not None and sweep.num_tokens is not None:
        for batch in sweep.batch_sizes:
            for tokens in sweep.num_tokens:
                yield measure(batch, tokens)
        return
    most = max(sweep.num_tokens or [limits.max_num_tokens])
    sizes, patience = _values(sweep.batch_sizes, doubling(1, limits.max_batch_size))
    yield from _walk(sizes, lambda batch: measure(batch, most), patience)
    batch = knee(points)["max_batch_size"]
    down, patience = _values(sweep.num_tokens, doubling(_least_num_tokens(batch, limits), most)[::-1])
    below = [tokens for tokens in down if tokens != most]
    yield from _walk(below, lambda tokens: measure(batch, tokens), patience)


def knee(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """See KNEE."""
    return max(points, key=lambda point: point["power"])


def _values(chosen: Sequence[int] | None, found: list[int]) -> tuple[Sequence[int], int]:
    """What to walk, and how patiently: what the user chose is measured to its end."""
    return (found, _PATIENCE) if chosen is None else (chosen, len(chosen))


def _walk(
    values: Sequence[int], measure: Callable[[int], dict[str, Any]], patience: int
) -> Iterator[dict[str, Any]]:
    best, worse = 0.0, 0
    for value in values:
        point = measure(value)
        yield point
        worse = worse + 1 if point["power"] < best else 0
        best = max(best, point["power"])
        if worse >= patience:
            return


def _measure(llm: MeasuredLLM, sweep: Sweep, batch: int, tokens: int, number: int) -> dict[str, Any]:
    llm.set_limits(batch, tokens)
    llm.run(sweep.requests(batch, 2 * number))
    run = llm.run(sweep.requests(batch * sweep.requests_per_slot, 2 * number + 1))
    figures = throughput_metrics(run)
    power = figures["output_throughput"] / figures["median_tpot_ms"] * 1e3
    return {"max_batch_size": batch, "max_num_tokens": tokens, "power": power, **figures}


def _least_num_tokens(batch: int, limits: Limits) -> int:
    return min(max(_LEAST_NUM_TOKENS, batch), limits.max_num_tokens)
