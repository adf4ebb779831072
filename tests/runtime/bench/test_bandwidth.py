"""Measuring the memory's bandwidth, on a driver made of host memory where it is a GPU's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "executors"))
from fake_cuda import FakeCuda

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.bench import bandwidth, device_read
from tapeout.runtime.executors.cuda import driver


class Ptx(FakeCuda):
    """Takes PTX where the executor's tests take cubins only."""

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Any, ...]:  # noqa: N802 (the driver's name)
        assert cubin.endswith(b"}\n\0")
        return self._made("cuModuleLoadData", "module")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Ptx:
    fake = Ptx(free=256 << 20)
    monkeypatch.setattr(driver, "cu", fake)
    driver.open_device.cache_clear()
    return fake


def test_the_host_reads_at_a_plausible_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_HOST_BYTES", 8 << 20)
    measured = bandwidth._host_bandwidth(2)
    assert 1e8 < measured.bytes_per_second < 1e13
    assert "2 threads" in measured.method


def test_a_gpu_is_measured_by_a_kernel_that_reads(cuda: Ptx, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(driver, "launch", lambda *args: launches.append(args))
    measured = bandwidth._device_bandwidth()
    assert len(launches) == bandwidth._READS * (bandwidth._ROUNDS + 1)
    _, grid, threads, _, _, (_, words, _), _ = launches[0]
    assert words % (4 * threads * grid[0]) == 0, "every thread must stay inside the buffer"
    assert 100 << 20 < words * 16 <= 128 << 20  # half of what is free
    assert measured.bytes_per_second > 0
    assert not any(cuda.open.values()), "all that was made is freed"


def test_without_the_drivers_compiler_the_error_says_what_to_do(cuda: Ptx) -> None:
    cuda.fail.add("cuModuleLoadData")
    with pytest.raises(TapeoutError) as failed:
        device_read.DeviceReader(64 << 20)
    assert "--no-roofline" in (failed.value.hint or "")
    assert cuda.open["memory"] == 0
