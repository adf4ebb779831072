"""What the CUDA executor refuses before it loads an engine, and what is left when loading fails."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_cuda import FakeCuda

from tapeout.cli.main import cli
from tapeout.plugins.errors import CapacityError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.runtime import LLM
from tapeout.runtime.engine import Engine, open_engine, reader, target
from tapeout.runtime.executors import load_executor, memory_left
from tapeout.runtime.executors.cuda import driver
from tapeout.runtime.executors.cuda import executor as executor_module

Install = Callable[[FakeCuda], FakeCuda]
PAGES = 8


def test_too_little_memory_is_told_line_by_line(engine: Engine, install: Install) -> None:
    cuda = FakeCuda(free=1 << 20)
    install(cuda)
    with pytest.raises(CapacityError) as error:
        load_executor(engine, num_pages=1 << 20)
    text = error.value.render()
    parts = (
        "weights",
        "arena",
        "workspace",
        "sampling",
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
    fixed += 4 * (64 + 4 + 4 + 48 * 4 + 2 * 12 * 4 + 304 * 4)  # sampling: 4 slots, 300 ids
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


def test_another_gpu_is_refused_before_anything_is_allocated(engine: Engine, install: Install) -> None:
    for fake, parts in (
        (FakeCuda(sm=80, name="NVIDIA A100-SXM4-80GB"), ("cuda:sm_90", "sm_90", "A100", "sm_80")),
        (FakeCuda(driver=12080), ("CUDA 13.", "driver is for CUDA 12.8")),
    ):
        install(fake)
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
    engine: Engine, install: Install, caplog: pytest.LogCaptureFixture, sku: str, name: str,
    warned: bool,
) -> None:  # fmt: skip
    install(FakeCuda(name=name))
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
    engine: Engine, install: Install, target: str, name: str, parts: tuple[str, ...]
) -> None:
    fake = FakeCuda(name=name)
    install(fake)
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
    engine_path: Path, monkeypatch: pytest.MonkeyPatch, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(FakeCuda(name="NVIDIA H100 PCIe"))
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
    engine: Engine, monkeypatch: pytest.MonkeyPatch, install: Install, no_library: bool
) -> None:
    def no_driver(flags: int) -> tuple[Any, ...]:
        if no_library:  # as cuda-bindings says it
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        return (driver.cu.CUresult.CUDA_ERROR_NO_DEVICE,)

    fake = FakeCuda()
    monkeypatch.setattr(fake, "cuInit", no_driver, raising=False)
    install(fake)
    reason = "libcuda.so.1" if no_library else "NO_DEVICE"
    with pytest.raises(
        EngineIncompatibleError, match=rf"built for cuda:sm_90, this machine is cpu:.*{reason}"
    ):
        memory_left(engine)


def test_launches_of_another_version_are_refused(engine: Engine, cuda: FakeCuda) -> None:
    table = engine.launches
    assert table is not None
    first, *others = table.receive[0].args
    odd = replace(table.receive[0], args=(replace(first, kind="colour"), *others))
    engine.launches = replace(
        table, receive=(odd,), kernels=(replace(table.kernels[0], blob="gone"), *table.kernels)
    )
    for call in (lambda: load_executor(engine, num_pages=PAGES), lambda: memory_left(engine)):
        with pytest.raises(EngineIncompatibleError, match="'colour', which is unknown; no cubin gone"):
            call()
    assert not cuda._blocks
    assert not any(cuda.open.values())


def test_a_cubin_the_driver_does_not_take_is_an_incompatible_engine(
    engine: Engine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    for call, status in (
        ("cuModuleLoadData", driver.cu.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU),
        ("cuModuleGetFunction", driver.cu.CUresult.CUDA_ERROR_NOT_FOUND),
    ):
        monkeypatch.setattr(cuda, call, lambda *_, status=status: (status, None))
        with pytest.raises(EngineIncompatibleError, match=status.name):
            load_executor(engine, num_pages=PAGES)
        monkeypatch.undo()
        install(cuda)
    assert cuda.open["memory"] == cuda.open["pinned"] == 0


def test_kernels_of_another_abi_are_refused_when_the_file_is_opened(
    engine_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the launches are decoded, whose form may be another as well."""
    monkeypatch.setattr(reader, "KERNEL_ABI", 7)
    monkeypatch.setattr(reader.LaunchTable, "from_json", lambda data: pytest.fail("launches were decoded"))
    with pytest.raises(EngineIncompatibleError, match="kernel ABI 4, this tapeout's is 7") as error:
        open_engine(engine_path)
    assert "tapeout build" in str(error.value.hint)
