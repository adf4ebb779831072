"""Timings of GPUs in the timing cache: for whom an entry answers, and what makes it stale."""

from __future__ import annotations

import importlib
import json
import linecache
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_kernels import FakeTactic

from tapeout.compiler import cuda_plan
from tapeout.compiler.tactics.cache import Machine, TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings, RegionOutcome, gpus_in, timings_for
from tapeout.compiler.tactics.gpu_contests import contests
from tapeout.compiler.tactics.gpu_select import unanswered
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import CudaTarget
from tapeout.plugins.errors import UsageError
from tapeout.plugins.triton_aot import digest
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.target import GpuFacts

H200 = Gpu("NVIDIA H200", 90, 132, 140)
H100 = Gpu("NVIDIA H100 80GB HBM3", 90, 132, 79)
H100_PCIE = Gpu("NVIDIA H100 PCIe", 90, 114, 79)
SLICE = Gpu("NVIDIA H200 MIG 1g.18gb", 90, 16, 16)
L4 = Gpu("NVIDIA L4", 89, 58, 22)
PLACE = ("add(float32[T,16])", "mixed", "batch 2", 4, "kernel")
TIME = Outcome(3.125)


def put(cache: TimingCache, gpu: Gpu = H200, outcome: Outcome = TIME) -> TimingCache:
    GpuTimings(cache, gpu).put(*PLACE, "gemv", outcome)
    return cache


def holding(*gpus: Gpu) -> TimingCache:
    cache = TimingCache(Path("gpus.json"))
    for gpu in gpus:
        put(cache, gpu)
    return cache


def test_what_is_put_is_got(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    cache = put(TimingCache.load(path))
    lost = ("add(float32[T,16])", "decode", "", 1, "other")
    GpuTimings(cache, H200).put(*lost, "split", Outcome(None, "hangs"))
    cache.save()
    timings = GpuTimings(TimingCache.load(path), H200)
    assert timings.get(*PLACE) == TIME
    assert timings.get(*lost) == Outcome(None, "hangs")
    (entry, _) = sorted(json.loads(path.read_text())["entries"].values(), key=lambda e: -len(e["conditions"]))
    assert entry == {
        "signature": PLACE[0], "kind": "mixed", "conditions": "batch 2",
        "gpu": {"name": "NVIDIA H200", "sm": 90, "sm_count": 132, "memory_gib": 140},
        "rows": {"4": {"kernel": {"tactic": "gemv", "time_us": 3.125}}},
    }  # fmt: skip


@pytest.mark.parametrize("part", range(len(PLACE)))
def test_anything_else_is_unknown(part: int) -> None:
    other: list[Any] = list(PLACE)
    other[part] = 8 if part == 3 else "other"
    assert GpuTimings(holding(H200), H200).get(*other) is None


@pytest.mark.parametrize("change", [{"name": "NVIDIA H20"}, {"sm_count": 78}, {"memory_gib": 96}])
def test_another_gpu_is_unknown(change: dict[str, object]) -> None:
    assert GpuTimings(holding(H200), replace(H200, **change)).get(*PLACE) is None  # type: ignore[arg-type]


def test_a_gpu_is_known_by_its_facts() -> None:
    assert Gpu.of(GpuFacts("NVIDIA H200", 90, 132, 150754820096, 13000)) == H200
    assert H200.text() == "NVIDIA H200 (sm_90, 132 multiprocessors, 140 GiB)"


class TestTargets:
    @pytest.mark.parametrize(
        ("target", "sm", "held", "expected"),
        [
            ("cuda:h200", 90, (H200, H100, L4), H200),
            ("cuda:sm_90", 90, (H200, L4), H200),
            ("cuda:sm_90", 90, (SLICE,), SLICE),  # whoever times on a slice means slices
            ("cuda:h200", 90, (SLICE, H100), None),
            ("cuda:h100", 90, (H100_PCIE,), H100_PCIE),
            ("cuda:h100", 90, (H100, H100_PCIE), H100),  # the table's number of multiprocessors
            ("cuda:sm_80", 80, (H200, L4), None),
            ("cuda:l4", 89, (H200, L4), L4),
            ("cuda:h200", 90, (), None),
        ],
    )
    def test_whose_timings_serve(self, target: str, sm: int, held: tuple[Gpu, ...], expected: Gpu) -> None:
        timings = timings_for(holding(*held), target, sm)
        assert (timings and timings.gpu) == expected

    def test_several_gpus_of_one_capability_are_named(self) -> None:
        with pytest.raises(UsageError) as caught:
            timings_for(holding(H200, H100, L4), "cuda:sm_90", 90)
        message = caught.value.message
        assert message.startswith(
            "timing cache gpus.json holds timings of 2 GPUs that cuda:sm_90 could mean:"
        )
        assert f"\n  {H100.text()}\n  {H200.text()}" in message
        assert caught.value.hint == "name the model: cuda:h100, cuda:h200"

    def test_several_of_one_model_take_a_cache_each(self) -> None:
        with pytest.raises(UsageError) as caught:
            timings_for(holding(H200, replace(H200, memory_gib=100)), "cuda:h200", 90)
        assert caught.value.hint == "keep a timing cache for each of them"


class TestFile:
    def test_two_who_save_lose_nothing(self, tmp_path: Path) -> None:
        """Also beside timings of a CPU, which stand in the same file."""
        path = tmp_path / "timings.json"
        first, second, third = (TimingCache.load(path) for _ in range(3))
        put(first)
        put(second, L4)
        put(second, H200, Outcome(9.0))  # the same place: who saves last wins
        machine = Machine("cpu", "x86_64_v2", 1, "kernels", "2.13", "batch 4")
        third.put("add", machine, 1, {"aten": Outcome(5.0)})
        for cache in (first, second, third):
            cache.save()
        merged = TimingCache.load(path)
        assert gpus_in(merged, 90) == [H200]
        assert gpus_in(merged, 89) == [L4]
        assert GpuTimings(merged, H200).get(*PLACE) == Outcome(9.0)
        assert merged.get("add", machine, 1, {"aten"}) == {"aten": Outcome(5.0)}

    def test_it_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"timing cache .* cannot be written"):
            put(TimingCache.load(tmp_path / "gone" / "gpus.json")).save()

    @pytest.mark.parametrize(
        "gpu", [3, {}, {"name": "x"}, {"name": "x", "sm": "90", "sm_count": 1, "memory_gib": 1}]
    )
    def test_an_entry_without_its_gpu_is_refused(self, tmp_path: Path, gpu: object) -> None:
        path = tmp_path / "gpus.json"
        path.write_text(json.dumps({"version": 1, "entries": {"k": {"gpu": gpu, "rows": {}}}}))
        with pytest.raises(UsageError, match=r"not a timing cache: entry k does not say which GPU it is of"):
            TimingCache.load(path)

    def test_times_of_a_region_without_a_gpu_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "gpus.json"
        path.write_text(json.dumps({"version": 1, "entries": {"k": {"region": "r", "rows": {}}}}))
        with pytest.raises(UsageError, match=r"not a timing cache: entry k does not say which GPU it is of"):
            TimingCache.load(path)


LIMITS = Limits(max_batch_size=2, max_num_tokens=2, max_seq_len=64, tokens_per_page=16)
ADD = OpSignature("add", (TensorType("float32", ("T", 16)),) * 2, (), (TensorType("float32", ("T", 16)),))
KERNEL = '''
import triton


@triton.jit
def helper(x):
    return x + {number}


@triton.jit
def kernel(out):
    """{doc}"""
    helper(out)  # {doc}
'''


@pytest.fixture
def kernel_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes the module `changing_kernel` and makes everybody read it again."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(**values: object) -> None:
        (tmp_path / "changing_kernel.py").write_text(KERNEL.format(**values))
        sys.modules.pop("changing_kernel", None)
        importlib.invalidate_caches()
        linecache.clearcache()
        digest._source_closure.cache_clear()
        digest._begun.cache_clear()

    return write


def test_a_changed_kernel_is_unknown(
    kernel_source: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source, or that of what it calls; not its comments. So with another compiler or another SM."""
    tactic = FakeTactic("a", source=("changing_kernel", "kernel"))
    monkeypatch.setattr(cuda_plan, "cuda_tactics", lambda op: (tactic,))
    timings = GpuTimings(TimingCache(None), H200)

    def unknown(sm: int = 90) -> int:
        found = contests({ADD.key(): ADD}, LIMITS, CudaTarget(sm, 132, 232448))
        return len(unanswered(found, timings).contests)

    kernel_source(number=1, doc="old")
    assert unknown() == 2
    for contest in contests({ADD.key(): ADD}, LIMITS, CudaTarget(90, 132, 232448)):
        timings.put(
            contest.key, contest.kind, contest.conditions, contest.rows, contest.contenders[0].kernel_hash,
            "a", TIME,
        )  # fmt: skip
    assert unknown() == 0
    kernel_source(number=1, doc="new")
    assert unknown() == 0
    assert unknown(sm=100) == 2
    kernel_source(number=2, doc="new")
    assert unknown() == 2
    kernel_source(number=1, doc="new")
    assert unknown() == 0
    monkeypatch.setattr(digest, "triton_version", lambda: "0.0")
    assert unknown() == 2


class TestRegions:
    PLACE = ("digest", "mixed", "profiles T 1 to 8", 4)
    TIME = RegionOutcome("own", "sha256", "tensorrt_rtx", "1.7.1.116", "", 3.0, 4.0)
    MISSING = replace(TIME, time_us=None, own_us=None, reason="not installed", unavailable=True)

    def test_what_is_put_is_got(self, tmp_path: Path) -> None:
        """Of one region and bucket several segments, and several of our kernels they were timed against."""
        path = tmp_path / "gpus.json"
        cache = TimingCache.load(path)
        other, later = replace(self.TIME, segment="other"), replace(self.TIME, own="later", time_us=5.0)
        for outcome in (self.TIME, other, later):
            GpuTimings(cache, H200).put_region(*self.PLACE, outcome)
        cache.save()
        timings = GpuTimings(TimingCache.load(path), H200)
        assert timings.knows_regions()
        assert not GpuTimings(TimingCache.load(path), H100).knows_regions()
        assert set(timings.get_regions(*self.PLACE, "own")) == {self.TIME, other}
        assert set(timings.get_regions(*self.PLACE)) == {self.TIME, other, later}
        for index, value in enumerate(("d", "decode", "profiles T 1 to 4", 2)):
            place = [*self.PLACE]
            place[index] = value
            assert timings.get_regions(*place, "own") == ()  # type: ignore[arg-type]

    def test_a_missing_package_hides_no_time(self) -> None:
        cache = TimingCache(None)
        timings = GpuTimings(cache, H200)
        timings.put_region(*self.PLACE, self.MISSING)
        assert timings.get_regions(*self.PLACE, "own") == (self.MISSING,)
        timings.put_region(*self.PLACE, self.TIME)
        timings.put_region(*self.PLACE, self.MISSING)
        assert timings.get_regions(*self.PLACE, "own") == (self.TIME,)

    @pytest.mark.parametrize(
        "change", [{"own_us": None}, {"own_us": -1.0}, {"segment": 3}, {"unavailable": 1}, {"time_us": "3"}]
    )
    def test_what_is_no_outcome_is_refused(self, change: dict[str, object], tmp_path: Path) -> None:
        path = tmp_path / "gpus.json"
        cache = TimingCache.load(path)
        GpuTimings(cache, H200).put_region(*self.PLACE, replace(self.TIME, **change))  # type: ignore[arg-type]
        cache.save()
        with pytest.raises(UsageError, match="is not a timing cache"):
            TimingCache.load(path)
