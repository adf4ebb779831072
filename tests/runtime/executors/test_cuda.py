"""The CUDA executor on a driver made of host memory: what it launches, copies, refuses and frees.

The engine and its launches are real, the kernels are not run: a stand-in for the model says that after
token n comes n + 1, as logits and as sampled ids. Numbers are checked on a GPU (docs/cuda.md).
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from click.testing import CliRunner
from fake_cuda import FakeCuda, Launched, words

from tapeout.cli.main import cli
from tapeout.compiler.build import build
from tapeout.compiler.options import BuildOptions
from tapeout.plugins.errors import CapacityError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime import LLM
from tapeout.runtime.engine import Engine, open_engine, reader, target
from tapeout.runtime.executors import load_executor, memory_left
from tapeout.runtime.executors.cuda import CudaExecutor, driver, replay
from tapeout.runtime.executors.cuda import executor as executor_module
from tapeout.runtime.step import FROM_SLOT, StepInputs

Step = Callable[..., StepInputs]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ON_HOST = SamplingParams(temperature=0.0, max_tokens=8, repetition_penalty=1.01)
NO_PROMPT = np.zeros(0, np.int32)
VOCAB, PAGES = 300, 8


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parents[2] / "models.py")
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    folder = tmp_path_factory.mktemp("cuda")
    options = BuildOptions(
        target="cuda:sm_90", dtype=request.param, max_batch_size=4, max_num_tokens=16, max_seq_len=64,
        tokens_per_page=16,
    )  # fmt: skip
    build(str(models.make_tiny("llama", folder / "model")), folder / "model.engine", options)
    return folder / "model.engine"


@pytest.fixture
def engine(engine_path: Path) -> Iterator[Engine]:
    with open_engine(engine_path) as engine:
        yield engine


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    install(fake, monkeypatch)
    yield fake
    driver.open_device.cache_clear()


def install(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (driver, replay):
        monkeypatch.setattr(module, "cu", fake)
    driver.open_device.cache_clear()


class NextToken:
    """Fills FROM_SLOT ids as the fill kernel does, writes logits that prefer id + 1, samples that."""

    def __init__(self, executor: CudaExecutor, engine: Engine) -> None:
        self._address, self._logits = executor._steps.address, executor._replay.logits_address()
        self._view, self._dtype = engine.program.logits, engine.program.logits.dtype
        self._ids: list[int] = []

    def __call__(self, launched: Launched) -> None:
        if launched.symbol == "fill_token_ids":
            self._fill(*(int(v) for v in launched.values[:5]))
        elif launched.symbol == "choose":
            counts, row_ids, row_seqs, _, slots, _, out_ids, out_finite, last_ids = map(
                int, launched.values[4:13]
            )
            r = words(counts, 5)[4]
            for i, row in enumerate(words(row_ids, r)):
                slot = words(slots + 4 * words(row_seqs + 4 * row, 1)[0], 1)[0]
                for address, value in (
                    (out_ids + 4 * i, self._ids[row] + 1), (out_finite + 4 * i, 1),
                    (last_ids + 4 * slot, self._ids[row] + 1),
                ):  # fmt: skip
                    ctypes.c_int32.from_address(address).value = value

    def _fill(self, token_ids: int, counts: int, row_seqs: int, slots: int, last_ids: int) -> None:
        t, _, _, _, r = words(counts, 5)
        ids = words(token_ids, t)
        for i, seq in enumerate(words(row_seqs, t)):
            if ids[i] == FROM_SLOT:
                ids[i] = words(last_ids + 4 * words(slots + 4 * seq, 1)[0], 1)[0]
        self._ids = ids
        logits = np.zeros((r, self._view.strides[0]), np.float32)
        for i, row in enumerate(words(self._address("row_ids"), r)):
            logits[i, ids[row] + 1] = 1.0
        raw = logits.tobytes()
        if self._dtype == "bfloat16":
            raw = (logits.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        ctypes.memmove(self._logits, raw, len(raw))


@pytest.fixture
def executor(engine: Engine, cuda: FakeCuda) -> Iterator[CudaExecutor]:
    executor = load_executor(engine, num_pages=PAGES)
    assert isinstance(executor, CudaExecutor)
    cuda.on_launch = NextToken(executor, engine)
    yield executor
    executor.close()
    assert not any(cuda.open.values()), cuda.open
    assert cuda.contextless_calls == []


def greedy(executor: CudaExecutor, *slots: int) -> None:
    for slot in slots:
        executor.admit(slot, GREEDY, NO_PROMPT)


def ids_of(handle: Any) -> list[int]:
    return list(map(int, handle.result().token_ids))


def test_steps_queued_ahead_read_ids_from_slots(executor: CudaExecutor, step: Step, cuda: FakeCuda) -> None:
    greedy(executor, 1, 3)
    handles = [executor.submit(step((1, [7, 8, 9], 0, [5]), (3, [20], 0, [2])))]
    # More steps than results the executor keeps: the oldest are read before their buffers are reused.
    for i in range(7):
        handles.append(executor.submit(step((3, [FROM_SLOT], 1 + i, [2]), (1, [FROM_SLOT], 3 + i, [5]))))
    assert ids_of(handles[0]) == [10, 21]
    assert [ids_of(h) for h in handles[1:]] == [[22 + i, 11 + i] for i in range(7)]
    assert handles[0].result() is handles[0].result()
    assert all(h.result().finite.all() for h in handles)
    assert cuda.graph_launches == 8
    assert cuda.open["exec"] == 2  # 4 rows and 2 rows


def test_what_is_launched_is_what_the_kernels_take(
    executor: CudaExecutor, engine: Engine, step: Step, cuda: FakeCuda
) -> None:
    greedy(executor, 0)
    executor.submit(step((0, [1, 2, 3], 0, [0]))).result()
    table = engine.launches
    assert table is not None
    program = engine.program
    kernels = {k.symbol: k for k in table.kernels}
    assert cuda.launched[0].symbol == "fill_token_ids"
    assert cuda.launched[-1].symbol == "choose"
    assert len(cuda.launched) >= len(program.records) + 3
    for launched in cuda.launched:
        assert launched.symbol in kernels
        assert all(n >= 1 for n in launched.grid)
        for value, type_ in zip(launched.values, launched.types, strict=True):
            if type_ is ctypes.c_void_p and value:
                assert cuda.holds(int(value)), launched.symbol
                assert int(value) % 16 == 0 or "step" in launched.symbol, launched.symbol
    weights = {
        v for x in cuda.launched for v, t in zip(x.values, x.types, strict=True) if t is ctypes.c_void_p
    }
    for name in engine.weights:
        assert executor._replay._memory.weights.address(name) in weights, name


def test_weights_arrive_unchanged(executor: CudaExecutor, engine: Engine) -> None:
    for name, info in engine.weights.items():
        address = executor._replay._memory.weights.address(name)
        assert ctypes.string_at(address, info.size_bytes) == bytes(engine.weight(name).data), name


def test_forward_leaves_the_slots_alone(executor: CudaExecutor, step: Step, cuda: FakeCuda) -> None:
    greedy(executor, 0)
    executor.submit(step((0, [5], 0, [1]))).result()
    cuda.launched.clear()
    for _ in range(2):
        logits = executor.forward(step((0, [FROM_SLOT], 1, [1])))
        assert logits.shape == (1, VOCAB)
        assert logits.dtype == np.float32
        assert logits.argmax() == 7  # after 6, both times
    assert "choose" not in {x.symbol for x in cuda.launched}
    assert executor.forward(step((0, [1, 2], 0, [1]), sample=[])).shape == (0, VOCAB)


def test_requests_the_device_cannot_sample_go_through_the_host(
    executor: CudaExecutor, step: Step, cuda: FakeCuda
) -> None:
    greedy(executor, 0)
    executor.admit(1, ON_HOST, NO_PROMPT)
    cuda.launched.clear()
    assert ids_of(executor.submit(step((0, [5], 0, [1]), (1, [9], 0, [2])))) == [6, 10]
    assert "choose" not in {x.symbol for x in cuda.launched}
    # The slots go on from what the host chose, on the device as well.
    handles = [
        executor.submit(step((0, [FROM_SLOT], 1, [1]))), executor.submit(step((1, [FROM_SLOT], 1, [2]))),
    ]  # fmt: skip
    assert [ids_of(h) for h in handles] == [[7], [11]]


def test_a_failed_step_surfaces_and_later_ones_run(executor: CudaExecutor, step: Step) -> None:
    greedy(executor, 0)
    executor.submit(step((0, [5], 0, [1]))).result()
    with pytest.raises(TapeoutError, match=r"token ids outside \[0, 300\)"):
        executor.submit(step((0, [VOCAB], 1, [1])))
    with pytest.raises(TapeoutError, match="or a slot without one"):
        executor.submit(step((0, [FROM_SLOT], 1, [1])))
    assert ids_of(executor.submit(step((0, [30], 1, [1])))) == [31]


def test_a_new_request_does_not_see_the_last_id_of_its_slot(executor: CudaExecutor, step: Step) -> None:
    greedy(executor, 0)
    executor.submit(step((0, [5], 0, [1]))).result()
    greedy(executor, 0)
    with pytest.raises(TapeoutError, match="a slot without one"):
        executor.submit(step((0, [FROM_SLOT], 1, [1])))
    with pytest.raises(UsageError, match="slot 4 does not exist"):
        greedy(executor, 4)


def test_all_faults_of_a_step_are_listed(executor: CudaExecutor, step: Step) -> None:
    inputs = step((0, [1, 2], 0, [PAGES]))
    inputs = replace(inputs, row_ids=np.array([5], np.int32), positions=inputs.positions + 64)
    with pytest.raises(TapeoutError) as error:
        executor.submit(inputs)
    for part in ("positions outside [0, 64)", f"page ids outside [0, {PAGES})", "logit rows outside [0, 2)"):
        assert part in error.value.message
    with pytest.raises(TapeoutError, match=r"slots \[1\] for logit rows of slots \[0\]"):
        executor.submit(replace(step((0, [1], 0, [1])), row_slots=np.array([1], np.int32)))
    with pytest.raises(TapeoutError, match="a position at or above its sequence's cache length"):
        executor.submit(replace(step((0, [1], 3, [1])), positions=np.array([4], np.int32)))
    with pytest.raises(TapeoutError, match="17 token rows, expected 1 to 16"):
        executor.forward(step((0, [1] * 17, 0, [1, 2])))


@pytest.mark.parametrize(
    "call", ["cuLaunchKernelEx", "cuGraphInstantiate", "cuGraphLaunch", "cuMemcpyHtoDAsync"]
)
def test_a_driver_error_is_told_and_leaves_nothing_half_done(
    executor: CudaExecutor, step: Step, cuda: FakeCuda, call: str
) -> None:
    greedy(executor, 0)
    cuda.fail = {call}
    with pytest.raises(TapeoutError, match=r"CUDA: .*CUDA_ERROR_LAUNCH_FAILED"):
        executor.submit(step((0, [5], 0, [1])))
    cuda.fail = set()
    assert cuda.open["graph"] == 0
    with pytest.raises(TapeoutError, match="a slot without one"):
        executor.submit(step((0, [FROM_SLOT], 1, [1])))
    assert ids_of(executor.submit(step((0, [5], 0, [1])))) == [6]


def test_an_error_of_the_device_surfaces_from_the_result(
    executor: CudaExecutor, step: Step, cuda: FakeCuda
) -> None:
    greedy(executor, 0)
    handle = executor.submit(step((0, [5], 0, [1])))
    cuda.fail = {"cuEventSynchronize"}
    with pytest.raises(TapeoutError, match="waiting for a step"):
        handle.result()
    cuda.fail = set()
    with pytest.raises(TapeoutError, match="waiting for a step"):
        handle.result()


def test_any_thread_may_call(executor: CudaExecutor, step: Step) -> None:
    """Contexts belong to threads: the fixture fails when a call was made without one."""
    found: list[list[int]] = []

    def run() -> None:
        greedy(executor, 0)
        handles.append(executor.submit(step((0, [5], 0, [1]))))
        executor.forward(step((0, [FROM_SLOT], 1, [1])))

    handles: list[Any] = []
    for work in (run, lambda: found.append(ids_of(handles[0])), executor.close):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [[6]]


def test_closed_executor(executor: CudaExecutor, step: Step, cuda: FakeCuda) -> None:
    greedy(executor, 0)
    queued = executor.submit(step((0, [5], 0, [1])))
    executor.close()
    executor.close()
    assert not any(cuda.open.values())
    assert ids_of(queued) == [6]
    for call in (lambda: executor.forward(step((0, [5], 0, [1]))), lambda: greedy(executor, 0)):
        with pytest.raises(TapeoutError, match="closed"):
            call()


def test_requests_run_through_the_public_api(
    engine_path: Path, engine: Engine, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "tapeout")
    with LLM(str(engine_path), max_tokens_in_kv_cache=128) as llm:
        cuda.on_launch = NextToken(llm._executor, engine)  # type: ignore[arg-type]
        greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        params = [greedy, replace(greedy, repetition_penalty=1.01), greedy]
        prompts = [{"prompt_token_ids": ids} for ids in ([9, 10], [100], list(range(200, 221)))]
        outputs = llm.generate(prompts, params)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [list(range(n, n + 6)) for n in (11, 101, 221)]
    assert not any(cuda.open.values())


# ---- loading --------------------------------------------------------------------------------


def test_too_little_memory_is_told_line_by_line(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(free=1 << 20)
    install(cuda, monkeypatch)
    with pytest.raises(CapacityError) as error:
        load_executor(engine, num_pages=1 << 20)
    text = error.value.render()
    parts = (
        "weights",
        "arena",
        "workspace",
        "kv cache (1048576 pages of 16 tokens)",
        "1.0 MiB are available",
    )
    assert all(part in text for part in parts), text
    cuda.free = 1 << 16
    with pytest.raises(CapacityError, match="weights"):
        memory_left(engine)
    # Room for everything but a single page: told line by line too, not as a pool of nothing.
    assert engine.launches is not None
    fixed = engine.weights_bytes + engine.program.arena_bytes
    fixed += engine.launches.workspace_bytes + engine.launches.scratch_bytes
    page = engine.manifest.kv_cache.page_bytes(16)
    cuda.free = fixed + page - 1
    with pytest.raises(CapacityError, match=r"weights(.|\n)*kv cache \(1 page of 16 tokens\)"):
        memory_left(engine)
    cuda.free = fixed + page
    assert memory_left(engine) == page
    assert not any(cuda.open.values())


@pytest.mark.parametrize(
    "call", ["cuModuleGetFunction", "cuMemcpyHtoDAsync", "cuMemHostAlloc", "cuEventCreate"]
)
def test_what_fails_while_loading_leaves_nothing_allocated(engine: Engine, cuda: FakeCuda, call: str) -> None:
    cuda.fail = {call}
    with pytest.raises(TapeoutError, match="CUDA_ERROR_LAUNCH_FAILED"):
        load_executor(engine, num_pages=PAGES)
    assert not any(cuda.open.values()), cuda.open


def test_another_gpu_is_refused_before_anything_is_allocated(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fake, parts in (
        (FakeCuda(sm=80, name="NVIDIA A100-SXM4-80GB"), ("cuda:sm_90", "sm_90", "A100", "sm_80")),
        (FakeCuda(driver=12080), ("CUDA 13.", "driver is for CUDA 12.8")),
    ):
        install(fake, monkeypatch)
        for call in (lambda: load_executor(engine, num_pages=PAGES), lambda: memory_left(engine)):
            with pytest.raises(EngineIncompatibleError) as error:
                call()
            assert all(part in error.value.message for part in parts), error.value.message
        assert not fake._blocks
    with pytest.raises(UsageError, match="num_pages is 0"):
        load_executor(engine, num_pages=0)


@pytest.mark.parametrize(
    ("sku", "name", "warned"),
    [
        ("sm_90", "NVIDIA H200", False), ("h200", "NVIDIA H200 NVL", False), ("h100", "NVIDIA H200", True),
        ("l4", "NVIDIA L40S", True), ("rtx5090", "NVIDIA GeForce RTX 5090", False),
    ],
)  # fmt: skip
def test_another_model_of_the_same_sm_is_a_warning(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sku: str, name: str,
    warned: bool,
) -> None:  # fmt: skip
    install(FakeCuda(name=name), monkeypatch)
    engine.manifest = replace(engine.manifest, target=f"cuda:{sku}")
    with caplog.at_level(logging.WARNING, "tapeout"):
        assert memory_left(engine) > 0
    assert (
        any(f"built for cuda:{sku}, this GPU is {name}" in r.getMessage() for r in caplog.records) == warned
    )


@pytest.mark.parametrize(
    ("target", "name", "parts"),
    [
        ("h200", "NVIDIA H200", ()),
        ("h200", "NVIDIA H200 NVL", ()),
        ("h100", "NVIDIA H200", ("built for cuda:h100, this GPU is NVIDIA H200", "another model of sm_90")),
        ("h200", "NVIDIA GH200 480GB", ("this GPU is NVIDIA GH200 480GB",)),
        ("h200", "NVIDIA H200 MIG 1g.18gb", ("this GPU is NVIDIA H200 MIG 1g.18gb",)),
        ("sm_90", "NVIDIA H200", ("every GPU of that compute capability", "names no model", "NVIDIA H200")),
    ],
)
def test_strict_sku_refuses_another_model(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, target: str, name: str, parts: tuple[str, ...]
) -> None:
    fake = FakeCuda(name=name)
    install(fake, monkeypatch)
    engine.manifest = replace(engine.manifest, target=f"cuda:{target}")
    if not parts:
        assert memory_left(engine, strict_sku=True) > 0
        return
    with pytest.raises(EngineIncompatibleError) as error:
        memory_left(engine, strict_sku=True)
    assert all(part in error.value.message for part in parts), error.value.message
    assert error.value.exit_code == 3
    assert "leave out --strict-sku" in str(error.value.hint)
    assert not fake._blocks


def test_strict_sku_through_the_public_api(engine_path: Path, cuda: FakeCuda) -> None:
    with pytest.raises(EngineIncompatibleError, match="names no model"):
        LLM(str(engine_path), strict_sku=True)
    result = CliRunner().invoke(cli, ["run", str(engine_path), "--strict-sku", "-p", "x"])
    assert result.exit_code == 3
    assert "--target cuda:SKU" in result.output


def test_another_model_is_told_once(
    engine_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(FakeCuda(name="NVIDIA H100 PCIe"), monkeypatch)
    original = target.check_sku

    def as_h200(engine: Engine, gpu: Any, *, strict: bool) -> None:
        engine.manifest = replace(engine.manifest, target="cuda:h200")
        original(engine, gpu, strict=strict)

    monkeypatch.setattr(executor_module, "check_sku", as_h200)
    with caplog.at_level(logging.WARNING, "tapeout"):
        LLM(str(engine_path)).close()
    assert (
        sum("it runs, with tactics chosen for another model" in r.getMessage() for r in caplog.records) == 1
    )


def test_without_cuda_bindings_the_extra_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    for call in (lambda: load_executor(engine, num_pages=PAGES), lambda: memory_left(engine)):
        with pytest.raises(UsageError) as error:
            call()
        assert "cuda-bindings" in error.value.message
        assert "tapeout[cuda]" in str(error.value.hint)


@pytest.mark.parametrize("no_library", [False, True])
def test_without_a_driver_both_machines_are_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, no_library: bool
) -> None:
    def no_driver(flags: int) -> tuple[Any, ...]:
        if no_library:  # as cuda-bindings says it
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        return (driver.cu.CUresult.CUDA_ERROR_NO_DEVICE,)

    fake = FakeCuda()
    monkeypatch.setattr(fake, "cuInit", no_driver, raising=False)
    install(fake, monkeypatch)
    reason = "libcuda.so.1" if no_library else "NO_DEVICE"
    with pytest.raises(
        EngineIncompatibleError, match=rf"built for cuda:sm_90, this machine is cpu:.*{reason}"
    ):
        memory_left(engine)


def test_launches_of_another_version_are_refused(engine: Engine, cuda: FakeCuda) -> None:
    table = engine.launches
    assert table is not None
    odd = replace(
        table.fill[0], args=(replace(table.fill[0].args[0], kind="colour"), *table.fill[0].args[1:])
    )
    engine.launches = replace(
        table, fill=(odd,), kernels=(replace(table.kernels[0], blob="gone"), *table.kernels)
    )
    for call in (lambda: load_executor(engine, num_pages=PAGES), lambda: memory_left(engine)):
        with pytest.raises(EngineIncompatibleError, match="'colour', which is unknown; no cubin gone"):
            call()
    assert not cuda._blocks
    assert not any(cuda.open.values())


def test_a_cubin_the_driver_does_not_take_is_an_incompatible_engine(
    engine: Engine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call, status in (
        ("cuModuleLoadData", driver.cu.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU),
        ("cuModuleGetFunction", driver.cu.CUresult.CUDA_ERROR_NOT_FOUND),
    ):
        monkeypatch.setattr(cuda, call, lambda *_, status=status: (status, None))
        with pytest.raises(EngineIncompatibleError, match=status.name):
            load_executor(engine, num_pages=PAGES)
        monkeypatch.undo()
        install(cuda, monkeypatch)
    assert cuda.open["memory"] == cuda.open["pinned"] == 0


def test_kernels_of_another_abi_are_refused_when_the_file_is_opened(
    engine_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the launches are decoded, whose form may be another as well."""
    monkeypatch.setattr(reader, "KERNEL_ABI", 7)
    monkeypatch.setattr(reader.LaunchTable, "from_json", lambda data: pytest.fail("launches were decoded"))
    with pytest.raises(EngineIncompatibleError, match="kernel ABI 1, this tapeout's is 7") as error:
        open_engine(engine_path)
    assert "tapeout build" in str(error.value.hint)
