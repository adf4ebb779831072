"""The least that a prefill of Llama-3.1-8B's shape takes with the vendor's libraries on a GPU.

    python benchmarks/library_floor.py [--tokens 2048,8192] [--seconds 3] [--out DIR]

For every prompt length one CUDA graph of a step's products (cuBLAS, through torch) and causal attention
(cuDNN), in bfloat16 on random values, and nothing else: no norms, rotary embedding, cache, activation,
residual or sampling, and, as in tapeout's engines, no MLP in the last layer. Replayed once from rest, then
one after the other, as a server would: at the power limit the clocks then settle. Also each part by itself,
32 layers of it in a graph, with the energy it takes. Needs torch with CUDA and nvidia-ml-py; writes
`library_floor.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HERE = Path(__file__).parent
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 32, 4096, 14336, 32, 8, 128
#: Rows and columns of a layer's weights.
WEIGHTS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
MLP = ("gate_up", "down")
_REST_SECONDS = 3.0


class Step:
    """Operands of one prompt of `tokens` tokens; every layer has weights of its own."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.weights = {
            name: [_random(*shape) * shape[1] ** -0.5 for _ in range(LAYERS)]
            for name, shape in WEIGHTS.items()
        }
        self.inputs = {name: _random(tokens, columns) for name, (_, columns) in WEIGHTS.items()}
        self.outputs = {name: _random(tokens, rows) for name, (rows, _) in WEIGHTS.items()}
        self.query = _random(1, HEADS, tokens, HEAD_DIM)
        self.key, self.value = (_random(1, KV_HEADS, tokens, HEAD_DIM) for _ in range(2))

    def product(self, name: str, layer: int) -> None:
        torch.mm(self.inputs[name], self.weights[name][layer].t(), out=self.outputs[name])

    def attention(self) -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(self.query, self.key, self.value, is_causal=True, enable_gqa=True)

    def layers(self, name: str) -> None:
        """One part of all layers."""
        for layer in range(LAYERS):
            if name == "attention":
                self.attention()
            else:
                self.product(name, layer)

    def whole(self) -> None:
        for layer in range(LAYERS):
            self.product("qkv", layer)
            self.attention()
            self.product("o", layer)
            for name in MLP if layer < LAYERS - 1 else ():
                self.product(name, layer)

    def operations(self, name: str) -> float:
        """Floating point operations of one layer's product, or of its attention."""
        if name == "attention":
            return 2.0 * self.tokens**2 * HEADS * HEAD_DIM
        return 2.0 * self.tokens * WEIGHTS[name][0] * WEIGHTS[name][1]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replayed(graph: torch.cuda.CUDAGraph, seconds: float, device: Any) -> dict[str, Any]:
    """Milliseconds of a replay from rest and of the later ones in a row, and the joules of one of these."""
    torch.cuda.synchronize()
    time.sleep(_REST_SECONDS)
    events, begin = [torch.cuda.Event(enable_timing=True)], time.perf_counter()
    events[0].record()
    joules: list[float] = []
    while time.perf_counter() - begin < seconds:
        graph.replay()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        events[-1].synchronize()
        joules.append(pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3)
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    half = len(times) // 2
    return {
        "first_ms": round(times[0], 3),
        "last_half_median_ms": round(statistics.median(times[half:]), 3),
        "last_half_joules": round((joules[-1] - joules[half]) / max(1, len(joules) - 1 - half), 3),
        "replays": len(times),
    }


def measured(tokens: int, seconds: float, device: Any) -> dict[str, Any]:
    step = Step(tokens)
    operations = {name: step.operations(name) for name in (*WEIGHTS, "attention")}
    whole = LAYERS * sum(operations.values()) - sum(operations[name] for name in MLP)
    result: dict[str, Any] = {"tokens": tokens, "whole": replayed(captured(step.whole), seconds, device)}
    result["whole"]["teraflops"] = _teraflops(whole, result["whole"])
    for name, count in operations.items():
        result[name] = replayed(captured(partial(step.layers, name)), seconds / 2, device)
        result[name]["teraflops"] = _teraflops(LAYERS * count, result[name])
    return result


def _teraflops(operations: float, times: dict[str, Any]) -> float:
    return round(operations / times["last_half_median_ms"] / 1e9, 1)


def conditions(commit: str | None) -> dict[str, Any]:
    if commit is None:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE, check=False
        )
        commit = described.stdout.strip() or "unknown"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="2048,8192", help="prompt lengths, by commas (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each whole step (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the record")
    parser.add_argument("--commit", help="where the checkout's own is not known")
    asked = parser.parse_args()
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    record = {
        "benchmark": "library_floor",
        "what": (__doc__ or "").splitlines()[0],
        "conditions": conditions(asked.commit),
        "settings": {"seconds": asked.seconds, "power_limit_w": _limit_w(device)},
        "prompts": [measured(int(n), asked.seconds, device) for n in asked.tokens.split(",")],
    }
    path = asked.out / "library_floor.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["prompts"], indent=1))
    print("wrote", path)


def _limit_w(device: Any) -> float:
    return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(device)) / 1e3


if __name__ == "__main__":
    main()
