"""Page copies of the CUDA executor on a driver made of host memory: bytes, streams, and their order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from next_token import NextToken

from tapeout.plugins.errors import CapacityError, TapeoutError
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime import LLM
from tapeout.runtime.engine import Engine
from tapeout.runtime.executors import load_executor
from tapeout.runtime.executors.cuda import CudaExecutor, driver
from tapeout.runtime.executors.cuda.page_memory import _runs
from tapeout.runtime.kv_cache import CopyKind, PageCopy
from tapeout.runtime.step import FROM_SLOT, StepInputs

WITHIN, OFFLOAD, ONBOARD = CopyKind
PAGES, HOST_PAGES = 8, 3
#: Copies with neighbours among them, so that some are joined.
RUNS = st.tuples(st.sampled_from(list(CopyKind)), st.integers(0, 2), st.integers(0, 2), st.integers(1, 3))
COPIES = st.lists(RUNS, max_size=6).map(
    lambda runs: [
        PageCopy(kind, source + i, target + i)
        for kind, source, target, count in runs
        for i in range(min(count, 3 - max(source, target)))
    ]
)


@pytest.fixture
def tiered(engine: Engine, cuda: FakeCuda) -> Iterator[CudaExecutor]:
    executor: Any = load_executor(engine, num_pages=PAGES, host_pages=HOST_PAGES)
    cuda.on_launch = NextToken(executor, engine)
    yield executor
    executor.close()
    assert not any(cuda.open.values()), cuda.open
    assert cuda.contextless_calls == []


def memories(executor: CudaExecutor) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [pages, page bytes] over the device pool and the pinned pages."""
    pages = executor._pages
    size = pages._page_bytes

    def view(address: int, count: int) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_uint8 * (count * size)).from_address(address)).reshape(
            count, size
        )

    return view(pages._pool_address, PAGES), view(pages._host_address, HOST_PAGES)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(copies=COPIES)
def test_bytes_arrive_as_if_copied_one_by_one(tiered: CudaExecutor, copies: list[PageCopy]) -> None:
    device, host = memories(tiered)
    device[:] = np.arange(PAGES, dtype=np.uint8)[:, None] + np.arange(device.shape[1], dtype=np.uint8)
    host[:] = 200 + np.arange(HOST_PAGES, dtype=np.uint8)[:, None]
    wanted = {WITHIN: (device.copy(),) * 2}
    mirror = host.copy()
    wanted |= {OFFLOAD: (wanted[WITHIN][0], mirror), ONBOARD: (mirror, wanted[WITHIN][0])}
    for kind, source, target in copies:
        origin, goal = wanted[kind]
        goal[target] = origin[source]
    tiered.copy_pages(copies)
    assert (device == wanted[WITHIN][0]).all()
    assert (host == mirror).all()


@given(copies=COPIES.filter(bool))
def test_neighbours_are_one_copy(copies: list[PageCopy]) -> None:
    runs = list(_runs(copies))
    assert [PageCopy(k, s + i, t + i) for (k, s, t), count in runs for i in range(count)] == copies
    for (kind, source, target), count in runs:
        assert kind is not WITHIN or abs(source - target) >= count or count == 1
    assert list(_runs([PageCopy(OFFLOAD, 1, 4), PageCopy(OFFLOAD, 2, 5), PageCopy(OFFLOAD, 4, 6)])) == [
        (PageCopy(OFFLOAD, 1, 4), 2), (PageCopy(OFFLOAD, 4, 6), 1),
    ]  # fmt: skip


def test_copies_have_a_stream_of_their_own_and_the_next_step_waits_for_it(
    tiered: CudaExecutor, step: Callable[..., StepInputs], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    for name in (
        "cuMemcpyDtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuGraphLaunch", "cuEventRecord",
        "cuStreamWaitEvent", "cuStreamSynchronize", "cuEventSynchronize",
    ):  # fmt: skip
        call = getattr(cuda, name)

        def noted(*args: Any, name: str = name, call: Any = call) -> Any:
            calls.append((name, args))
            return call(*args)

        monkeypatch.setattr(cuda, name, noted)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    tiered.admit(0, greedy, np.zeros(0, np.int32))
    first = tiered.submit(step((0, [5], 0, [1])))
    calls.clear()
    tiered.copy_pages([PageCopy(OFFLOAD, 2, 0), PageCopy(WITHIN, 3, 4), PageCopy(ONBOARD, 0, 5)])
    names = [name for name, _ in calls]
    assert names == [
        "cuMemcpyDtoHAsync",
        "cuMemcpyDtoDAsync",
        "cuMemcpyHtoDAsync",
        "cuEventRecord",
        "cuStreamWaitEvent",
    ]
    steps, copying = tiered._stream.handle, tiered._pages._stream.handle
    assert steps != copying
    assert {args[-1] for name, args in calls if name.startswith("cuMemcpy")} == {copying}
    event, stream = calls[3][1]
    assert (stream, calls[4][1]) == (copying, (steps, event, 0))
    calls.clear()
    second = tiered.submit(step((0, [FROM_SLOT], 1, [1])))
    assert "cuGraphLaunch" in [name for name, _ in calls]
    assert [h.result().token_ids.tolist() for h in (first, second)] == [[6], [7]]


def test_a_copy_that_fails_or_goes_nowhere_is_told(tiered: CudaExecutor, cuda: FakeCuda) -> None:
    with pytest.raises(TapeoutError, match="8 device pages and 3 host pages"):
        tiered.copy_pages([PageCopy(ONBOARD, 3, 0)])
    cuda.fail.add("cuMemcpyHtoDAsync")
    with pytest.raises(TapeoutError, match="copying to the device: CUDA_ERROR_LAUNCH_FAILED"):
        tiered.copy_pages([PageCopy(ONBOARD, 0, 0)])
    cuda.fail.clear()
    tiered.copy_pages([PageCopy(ONBOARD, 0, 0)])
    tiered.copy_pages([])


def test_host_memory_that_is_not_there_is_told_and_the_rest_freed(
    engine: Engine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CapacityError) as error:
        load_executor(engine, num_pages=PAGES, host_pages=1 << 40)
    assert error.value.hint == "the largest part is host tier of the kv cache: lower host_cache_bytes"
    pin = cuda.cuMemHostAlloc
    none = driver.cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    size = HOST_PAGES * engine.manifest.kv_cache.page_bytes(16)
    monkeypatch.setattr(cuda, "cuMemHostAlloc", lambda n, flags: (none, None) if n == size else pin(n, flags))
    with pytest.raises(CapacityError, match=f"pinning {size:,} bytes") as error:
        load_executor(engine, num_pages=PAGES, host_pages=HOST_PAGES)
    assert error.value.hint == "lower host_cache_bytes"
    assert not any(cuda.open.values()), cuda.open


def test_reuse_through_the_whole_runtime(engine_path: Any, cuda: FakeCuda) -> None:
    """Ids are those of a run without reuse, with pages going to the host and back."""

    def answers(**options: Any) -> tuple[list[tuple[int, ...]], Any]:
        with LLM(engine_path, max_tokens_in_kv_cache=5 * 16, **options) as llm:
            cuda.on_launch = NextToken(llm._executor, llm.engine)  # type: ignore[arg-type]
            params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            prompts = [[i + j for j in range(34)] for i in (1, 40, 80, 1, 40, 80)]
            outputs = [llm.generate([p], params)[0] for p in prompts]
            return [o.outputs[0].token_ids for o in outputs], llm.prefix_cache.stats()

    page_bytes = 2 * 2 * 2 * 16 * 16 * 4
    plain, stats = answers(enable_prefix_reuse=False)
    assert stats.cached_tokens == 0
    reused, stats = answers(host_cache_bytes=8 * page_bytes)
    assert reused == plain
    assert min(stats.offloaded_pages, stats.onboarded_pages) > 0
    assert stats.cached_tokens == 3 * 32
    assert not any(cuda.open.values()), cuda.open
