"""What is measured is what happened: prompts, moments, the walk of a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tapeout.runtime.bench.measured_llm import BenchRequest, Run, Timed, _StepTimes
from tapeout.runtime.bench.metrics import throughput_metrics
from tapeout.runtime.bench.prompts import prompt_ids
from tapeout.runtime.bench.roofline import kv_bytes_per_step, weight_bytes_per_step
from tapeout.runtime.bench.sweep import Sweep, check_sweep, doubling, knee, walk
from tapeout.runtime.bench.throughput import poisson_arrivals, random_requests
from tapeout.runtime.bench.workload import read_workload
from tapeout.runtime.engine import KvCacheLayout, Limits

M64 = (1 << 64) - 1


def splitmix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, 20261129, 2**32 - 1])
def test_prompts_follow_the_rule(seed: int) -> None:
    expected = [1000 + splitmix64(((seed << 32) + j) & M64) % 127000 for j in range(50)]
    assert prompt_ids(seed, 50, 1000, 128000).tolist() == expected


def test_the_shared_workload_is_read(repo: Path) -> None:
    path = repo / "benchmarks/peers/workload.json"
    workload, data = read_workload(path, 128256), json.loads(path.read_text())
    assert [p.name for p in workload.points if p.kind == "decode"] == [
        f"decode-{b}" for b in (1, 8, 32, 64, 128)
    ]
    assert sum(r.prompt_len for r in workload.mixed) == data["mixed"]["prompt_tokens"]
    assert sum(r.output_len for r in workload.mixed) == data["mixed"]["output_tokens"]
    eight = workload.points[1]
    assert eight.seeds(2)[3] == data["decode"][1]["seed_base"] + 2003
    assert workload.points[5].seeds(2) == [data["prefill"][0]["seed_base"] + 2]


def test_figures_of_known_moments() -> None:
    run = Run((Timed(10, 0.0, (1.0, 1.5, 3.0)), Timed(20, 0.5, (2.5,))), 4.0)
    figures = throughput_metrics(run)
    assert figures["total_num_tokens"] == 34
    assert figures["output_throughput"] == 1.0
    assert figures["mean_ttft_ms"] == 1500.0
    assert figures["median_tpot_ms"] == 1000.0  # the request of one token has none
    assert figures["mean_itl_ms"] == 1000.0
    assert figures["mean_e2el_ms"] == 2500.0
    assert run.first_token_seconds == 2.5


def test_tokens_get_the_moment_their_step_was_read(fakes: Any) -> None:
    """On the loop over a fake executor: prompts cut over steps, and requests that wait for a slot."""
    rig = fakes.make_rig(max_batch_size=2, max_num_tokens=6, num_pages=64)
    steps = _StepTimes()
    rig.loop.on_step = steps.planned
    lengths = [(10, 3), (2, 5), (4, 1), (3, 4)]
    for index, (prompt_len, tokens) in enumerate(lengths):
        rig.add([1 + index] * prompt_len, tokens, eos=frozenset())
    while rig.loop.has_work:
        rig.loop.step()
        steps.read(rig.loop.steps_read)
    times = steps.by_request()
    assert [len(times[f"r{i}"]) for i in range(4)] == [tokens for _, tokens in lengths]
    assert all(moments == sorted(set(moments)) for moments in times.values())
    assert times["r2"][0] > min(times["r0"][-1], times["r1"][-1])  # it had to wait for a slot


def test_random_lengths_stay_in_their_range() -> None:
    requests = random_requests(200, 100, 10, 0.5, 50, seed=3)
    lengths = [r.prompt_len for r in requests]
    assert (min(lengths) >= 50, max(lengths) <= 150) == (True, True)
    assert len(set(lengths)) > 10
    assert {r.output_len for r in requests} <= set(range(5, 16))
    assert all(r.prompt_token_ids.max() < 50 for r in requests)


def test_arrivals_have_the_rate_asked_for() -> None:
    requests = [BenchRequest(np.zeros(1, np.int32), 1)] * 2000
    arrivals = [r.arrival for r in poisson_arrivals(requests, rate=10, seed=0)]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(200, rel=0.1)


def test_the_roofline_counts_what_a_step_reads() -> None:
    def record(op: str, *weights: str, **attrs: Any) -> SimpleNamespace:
        return SimpleNamespace(op=op, weights=weights, attrs=attrs)

    engine: Any = SimpleNamespace(
        manifest=SimpleNamespace(kv_cache=KvCacheLayout(layers=2, kv_heads=3, head_dim=8, dtype="bfloat16")),
        weights={name: SimpleNamespace(size_bytes=size) for name, size in (("e", 1000), ("w", 70), ("b", 5))},
        program=SimpleNamespace(
            records=[
                record("embedding", "e"),
                record("rope_attention", window=0),
                record("linear", "w", "b"),
                record("paged_attention", window=12),
                record("linear", "w", ""),
            ]
        ),
    )
    assert weight_bytes_per_step(engine) == 70 + 5 + 70
    # Lengths 11, 12, 13 in the layer without a window, 11, 12, 12 in the other; 96 bytes for a position.
    assert kv_bytes_per_step(engine, 2, 10, 4) == 2 * 96 * (11 + 12 + 13 + 11 + 12 + 12) / 3


class FakeLLM:
    """Each request in flight makes every token slower: by little up to 4 of them, by much beyond."""

    def __init__(self, max_batch_size: int = 32, max_num_tokens: int = 512) -> None:
        limits = Limits(max_batch_size, max_num_tokens, 256, 16)
        self.engine = SimpleNamespace(manifest=SimpleNamespace(limits=limits))

    def set_limits(self, max_batch_size: int, max_num_tokens: int) -> None:
        self.batch, self.tokens = max_batch_size, max_num_tokens

    def run(self, requests: list[BenchRequest]) -> Run:
        tpot = 1.0 + 0.01 * self.batch + (self.batch > 4) * self.batch + (self.tokens < 256)
        seconds = len(requests) * tpot / self.batch
        return Run(tuple(Timed(4, 0.0, (1.0, 1.0 + tpot)) for _ in requests), seconds)


def sweep(batch_sizes: list[int] | None = None, num_tokens: list[int] | None = None) -> Sweep:
    def requests(count: int, number: int) -> list[BenchRequest]:
        return [BenchRequest(np.zeros(4, np.int32), 2)] * count

    return Sweep(batch_sizes, num_tokens, 2, requests)


def limits_of(points: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(p["max_batch_size"], p["max_num_tokens"]) for p in points]


def test_a_walk_ends_behind_the_knee() -> None:
    llm: Any = FakeLLM()
    points = list(walk(llm, sweep()))
    # Batches double until two in a row are worse; then tokens a step are halved at the best, likewise.
    assert limits_of(points) == [
        (1, 512),
        (2, 512),
        (4, 512),
        (8, 512),
        (16, 512),
        (4, 256),
        (4, 128),
        (4, 64),
    ]
    assert knee(points)["max_batch_size"] == 4
    assert points[0]["power"] == pytest.approx(points[0]["output_throughput"] / 1.01)


def test_what_the_user_lists_is_measured_to_its_end() -> None:
    llm: Any = FakeLLM()
    assert limits_of(list(walk(llm, sweep([4, 8, 16, 32], [128, 512])))) == [
        (b, t) for b in (4, 8, 16, 32) for t in (128, 512)
    ]
    assert limits_of(list(walk(llm, sweep(num_tokens=[64]))))[:2] == [(1, 64), (2, 64)]
    assert limits_of(list(walk(llm, sweep(batch_sizes=[16, 8]))))[:2] == [(16, 512), (8, 512)]


def test_doubling_ends_at_the_limit() -> None:
    assert doubling(1, 1) == [1]
    assert doubling(1, 6) == [1, 2, 4, 6]
    assert doubling(3, 12) == [3, 6, 12]


def test_a_sweep_stays_within_the_engine() -> None:
    check_sweep(sweep([4], [64]), Limits(4, 64, 32, 16), input_len=8, output_len=8, range_ratio=0.5)
