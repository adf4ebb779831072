"""Figures of a run, with the names that vLLM's benchmarks write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tapeout.runtime.bench.measured_llm import Run

PERCENTILES = (10, 25, 50, 75, 90, 99)


def latency_percentiles(latencies: Iterable[float]) -> dict[str, float]:
    """Seconds by percentile, as `vllm bench latency` writes them."""
    values = list(latencies)
    return {str(p): float(np.percentile(values, p)) for p in PERCENTILES}


def throughput_metrics(run: Run) -> dict[str, Any]:
    """The fields of `vllm bench throughput`, then those of `vllm bench serve`.

    `tpot` leaves out requests of one token; a kind of which there is nothing is None.
    """
    inputs = sum(r.prompt_len for r in run.requests)
    outputs = sum(len(r.token_times) for r in run.requests)
    gaps = [np.diff(r.token_times) for r in run.requests if len(r.token_times) > 1]
    return {
        "elapsed_time": run.elapsed,
        "num_requests": len(run.requests),
        "total_num_tokens": inputs + outputs,
        "requests_per_second": len(run.requests) / run.elapsed,
        "tokens_per_second": (inputs + outputs) / run.elapsed,
        "duration": run.elapsed,
        "completed": len(run.requests),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(run.requests) / run.elapsed,
        "output_throughput": outputs / run.elapsed,
        "total_token_throughput": (inputs + outputs) / run.elapsed,
        **_summary("ttft", [r.ttft for r in run.requests]),
        **_summary("tpot", [t for r in run.requests if (t := r.tpot) is not None]),
        **_summary("itl", np.concatenate(gaps).tolist() if gaps else []),
        **_summary("e2el", [r.latency for r in run.requests]),
    }


def _summary(name: str, seconds: list[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and 99th percentile, in milliseconds."""
    if not seconds:
        return dict.fromkeys(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99"))
    ms = np.array(seconds) * 1e3
    return {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
        f"p99_{name}_ms": float(np.percentile(ms, 99)),
    }
