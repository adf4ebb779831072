"""The least time of a decode step: bytes it has to read over the speed at which they can be read."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tapeout.runtime.bench.bandwidth import Bandwidth
from tapeout.runtime.engine import Engine


def weight_bytes_per_step(engine: Engine) -> int:
    """Bytes of weights that a step reads: all of them once, but tables of which it only picks rows."""
    return sum(
        engine.weights[name].size_bytes
        for record in engine.program.records
        if record.op != "embedding"
        for name in record.weights
        if name
    )


def kv_bytes_per_step(engine: Engine, batch: int, prompt_len: int, output_len: int) -> float:
    """Bytes of keys and values that a decode step reads, the mean over the steps of a batch.

    The step that gives token i + 1 of the output reads prompt_len + i positions of each row, or the
    window of a layer that has one.
    """
    kv = engine.manifest.kv_cache
    position_bytes = kv.page_bytes(1) / kv.layers
    # Whatever attention is fused with, it keeps this attribute.
    windows = [int(r.attrs["window"]) for r in engine.program.records if "window" in r.attrs]
    if len(windows) != kv.layers:
        windows = [0] * kv.layers
    lengths = range(prompt_len + 1, prompt_len + output_len)
    positions = sum(
        layers * sum(min(n, window) if window else n for n in lengths)
        for window, layers in Counter(windows).items()
    )
    return batch * position_bytes * positions / max(len(lengths), 1)


def roofline(
    engine: Engine, bandwidth: Bandwidth, batch: int, prompt_len: int, output_len: int, ms_per_step: float
) -> dict[str, Any]:
    """The roofline column of a decode point; `share` is 1 where a step takes no longer than its reads."""
    weights = weight_bytes_per_step(engine)
    kv = kv_bytes_per_step(engine, batch, prompt_len, output_len)
    floor_ms = (weights + kv) / bandwidth.bytes_per_second * 1e3
    return {
        "weight_bytes": weights,
        "kv_bytes": round(kv),
        "floor_ms": floor_ms,
        "share": floor_ms / ms_per_step,
        "bytes_per_second": (weights + kv) / ms_per_step * 1e3,
    }
