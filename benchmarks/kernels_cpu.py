"""Time the CPU tactics of linear, linear_int8 and paged_attention at SmolLM2-135M's shapes.

    python benchmarks/kernels_cpu.py [--op linear] [--dtype float32] [--rows 1,8] [--threads 2]

Prints the fastest of several passes in microseconds, and the bytes of weights (or of cached
keys and values) read a second. A pass runs over copies of the weights that together exceed the
last-level cache, as a model's layers do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from tapeout.plugins.cpu import BoundCall, CpuTactic, OpSignature, StepState, TensorType
from tapeout.plugins.example import example, example_step, torch_dtype
from tapeout.plugins.native import NativeLibrary, compile_native, detect_host, load_native
from tapeout.plugins.registry import OPS, cpu_tactics

LINEAR_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))  # (N, K)
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
STEPS = {
    "decode 1 x 256": ((1, 256),),
    "decode 8 x 256": ((1, 256),) * 8,
    "decode 32 x 512": ((1, 512),) * 32,
    "prefill 256": ((256, 256),),
    "prefill 64 + decode 7 x 256": ((64, 64), *((1, 256),) * 7),
}
ROTATED_BYTES = 128 << 20  # beyond the last-level cache
MAX_COPIES = 40


def best_us(runs: Sequence[Callable[[], None]], seconds: float) -> float:
    """Microseconds of one call in the fastest pass over `runs` within the time given."""
    best, stop = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        for run in runs:
            run()
        end = time.perf_counter()
        best = min(best, (end - start) / len(runs))
        if end > stop:
            return best * 1e6


def report(tactic: CpuTactic, label: str, microseconds: float, read_bytes: int) -> None:
    rate = read_bytes / microseconds / 1e3
    print(f"{tactic.op:16} {label:44} {tactic.name:12} {microseconds:10.1f} us {rate:7.2f} GB/s", flush=True)


def outputs_of(kinds: Sequence[TensorType]) -> list[torch.Tensor]:
    return [torch.empty(kind.shape, dtype=torch_dtype(kind.dtype)) for kind in kinds]


def linear_signature(op: str, dtype: str, n: int, k: int) -> OpSignature:
    weights = (TensorType(dtype, (n, k)),)
    if op == "linear_int8":
        weights = (TensorType("int8", (n, k)), TensorType("float32", (n,)))
    return OpSignature(op, (TensorType(dtype, ("T", k)),), weights, (TensorType(dtype, ("T", n)),))


def time_linear(op: str, dtype: str, rows: Sequence[int], kernels: NativeLibrary, seconds: float) -> None:
    host = detect_host()
    for n, k in LINEAR_SHAPES:
        signature = linear_signature(op, dtype, n, k)
        weight = example(signature, 1).weights
        read_bytes = sum(w.numel() * w.element_size() for w in weight)
        copies = max(1, min(MAX_COPIES, ROTATED_BYTES // read_bytes))
        for tactic in cpu_tactics(op):
            reason = tactic.unsupported(signature, host)
            if reason:
                print(f"{op:16} {dtype} [{n},{k}] {tactic.name}: {reason}")
                continue
            missing = [None] * (len(OPS[op].weights) - len(weight))
            prepared = [
                tactic.prepare([*(w.clone() for w in weight), *missing], signature.attrs)
                for _ in range(copies)
            ]
            for t in rows:
                case = example(signature, t)
                calls = [
                    BoundCall(case.inputs, p, outputs_of(case.outputs), {}, None, kernels)  # type: ignore[arg-type]
                    for p in prepared
                ]
                report(
                    tactic,
                    f"{dtype} [{n},{k}] T={t}",
                    best_us([tactic.bind(c) for c in calls], seconds),
                    read_bytes,
                )


def time_attention(dtype: str, kernels: NativeLibrary, seconds: float) -> None:
    host = detect_host()
    q, kv = TensorType(dtype, ("T", HEADS, HEAD_DIM)), TensorType(dtype, ("T", KV_HEADS, HEAD_DIM))
    attrs = {"layer": 0, "scale": HEAD_DIM**-0.5, "window": 0, "softcap": 0.0, "alibi": False}
    signature = OpSignature("paged_attention", (q, kv, kv), (), (q,), attrs)
    for label, sequences in STEPS.items():
        step: StepState = example_step(sequences, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
        case = example(signature, int(step.counts[0]))
        read_bytes = (
            sum(kv_len for _, kv_len in sequences) * 2 * KV_HEADS * HEAD_DIM * torch_dtype(dtype).itemsize
        )
        for tactic in cpu_tactics("paged_attention"):
            if tactic.unsupported(signature, host) is None:
                call = BoundCall(case.inputs, (), outputs_of(case.outputs), attrs, step, kernels)
                report(tactic, f"{dtype} {label}", best_us([tactic.bind(call)], seconds), read_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--op", choices=("linear", "linear_int8", "paged_attention"), action="append")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append")
    parser.add_argument("--rows", default="1,2,4,8,32,256", help="values of T, comma-separated")
    parser.add_argument("--threads", type=int, default=detect_host().threads)
    parser.add_argument("--seconds", type=float, default=0.3, help="time a figure may take")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = load_native(compile_native(detect_host().level), options.threads)
    rows = [int(t) for t in options.rows.split(",")]
    for dtype in options.dtype or ("float32", "bfloat16"):
        for op in options.op or ("linear", "linear_int8", "paged_attention"):
            if op == "paged_attention":
                time_attention(dtype, kernels, options.seconds)
            else:
                time_linear(op, dtype, rows, kernels, options.seconds)


if __name__ == "__main__":
    main()
