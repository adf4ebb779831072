"""Timing outlives what candidates do to its worker; nothing but the candidate is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tapeout.plugins.errors import EngineIncompatibleError, TapeoutError
from tapeout.runtime.tactic_timer.pack import Pack
from tapeout.runtime.tactic_timer.session import PackTimes, Result, time_pack

Write = Callable[..., tuple[Path, Pack]]
Worker = Callable[[str], tuple[str, ...]]


@pytest.fixture
def timed(write_pack: Write, worker: Worker) -> Callable[..., PackTimes]:
    """Times entries with candidates of these names, by the scripted worker."""

    def run(*entries: tuple[str, ...], **options: object) -> PackTimes:
        path, pack = write_pack(*entries)
        return time_pack(path, pack, worker=worker("scripted_worker.py"), **options)  # type: ignore[arg-type]

    return run


def outcomes(times: PackTimes, entry: int = 0) -> list[float | str | None]:
    found = [times.results[key] for key in sorted(times.results) if key[0] == entry]
    return [r.reason if r.time_us is None else r.time_us for r in found]


def test_times_and_reasons(timed: Callable[..., PackTimes]) -> None:
    told: list[str] = []
    times = timed(("fast3", "wrong", "slow50"), ("only8",), progress=told.append)
    assert outcomes(times) == [3, "output out: 3 of 8 elements differ", 50]
    assert times.results[1, 0] == Result(8)
    assert (times.restarts, times.skipped, times.gpu.name) == (0, {}, "NVIDIA H200")
    assert told == [
        "1 of 2: add0(float32[T,16]) at T = 4, mixed",
        "2 of 2: add1(float32[T,16]) at T = 4, mixed",
    ]
    assert times.seconds > 0


def test_a_pack_of_nothing(timed: Callable[..., PackTimes]) -> None:
    assert timed().results == {}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crash", "the process ended with SIGSEGV while checking crash"),
        ("fault", "CUDA_ERROR_ILLEGAL_ADDRESS while checking fault"),
        ("hang", "no answer within 1 s while checking hang"),
    ],
)
def test_a_fault_costs_one_candidate(timed: Callable[..., PackTimes], name: str, reason: str) -> None:
    """The entry is begun again without it; entries that are done are not."""
    start = time.monotonic()
    times = timed(("first1",), ("a4", name, "b5"), ("last6",), step_timeout_s=1)
    assert outcomes(times, 0) == [1]
    assert outcomes(times, 1) == [4, reason, 5]
    assert outcomes(times, 2) == [6]
    assert times.restarts == 1
    assert time.monotonic() - start < 20


def test_several_faults_in_one_entry(timed: Callable[..., PackTimes]) -> None:
    times = timed(("crash1", "fault2", "good7", "crash3"))
    assert [type(o) for o in outcomes(times)] == [str, str, float, str]
    assert times.restarts == 3


def test_the_worker_cannot_start(write_pack: Write, worker: Worker, tmp_path: Path) -> None:
    path, pack = write_pack(("a",))
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no such library')")
    command: Sequence[str] = (*worker("")[:-1], str(script))
    with pytest.raises(TapeoutError) as caught:
        time_pack(path, pack, worker=command)
    assert "failed before it measured anything: the process ended with exit code 1" in caught.value.message
    assert "no such library" in caught.value.message
    assert "nvidia-smi" in str(caught.value.hint)


def test_a_worker_that_ends_without_getting_on(write_pack: Write, worker: Worker, tmp_path: Path) -> None:
    """Or the parent would start it for ever."""
    path, pack = write_pack(("a",), ("b",))
    script = tmp_path / "quits.py"
    facts = '{"name": "GPU", "sm": 90, "sm_count": 1, "total_bytes": 1, "driver_version": 13000}'
    script.write_text(f'print(\'{{"event": "ready", "gpu": {facts}}}\')')
    with pytest.raises(TapeoutError, match=r"failed before it measured anything"):
        time_pack(path, pack, worker=(*worker("")[:-1], str(script)))


def test_a_reference_that_crashes_costs_its_entry(write_pack: Write, worker: Worker, tmp_path: Path) -> None:
    path, pack = write_pack(("a2", "b3"), ("c4",))
    script = tmp_path / "breaks.py"
    text = Path(worker("scripted_worker.py")[-1]).read_text()
    begin = 'send(event="begin", entry=index, candidate=-1, phase="reference")'
    assert begin in text
    script.write_text(text.replace(begin, f"{begin}\n    if index == 0:\n        os.abort()"))
    times = time_pack(path, pack, worker=(*worker("")[:-1], str(script)))
    assert outcomes(times, 0) == ["the process ended with SIGABRT while preparing the reference"] * 2
    assert outcomes(times, 1) == [4]


class TestRealWorker:
    """On a driver whose kernels do nothing."""

    def test_another_compute_capability_is_refused(self, write_pack: Write, worker: Worker) -> None:
        path, pack = write_pack(("a",), sm=80)
        with pytest.raises(EngineIncompatibleError) as caught:
            time_pack(path, pack, worker=worker("idle_gpu.py"))
        assert "holds kernels for sm_80 (cuda:h200), this GPU is NVIDIA H200, sm_90" in caught.value.message
        assert "--target cuda:sm_90 --pack FILE" in str(caught.value.hint)

    def test_an_older_driver_is_refused(self, write_pack: Write, worker: Worker) -> None:
        path, pack = write_pack(("a",), cuda="14.1")
        with pytest.raises(
            EngineIncompatibleError, match=r"made with CUDA 14\.1, .* driver is for CUDA 13\.0"
        ):
            time_pack(path, pack, worker=worker("idle_gpu.py"))

    def test_no_such_gpu(self, write_pack: Write, worker: Worker) -> None:
        path, pack = write_pack(("a",))
        with pytest.raises(EngineIncompatibleError, match=r"no usable NVIDIA GPU: .*opening GPU 7"):
            time_pack(path, pack, worker=worker("idle_gpu.py"), device=7)

    def test_kernels_that_take_long_enough(self, write_pack: Write, worker: Worker) -> None:
        """Nothing is found wrong, since comparing, too, does nothing."""
        path, pack = write_pack(("a", "b"), ("c",))
        times = time_pack(path, pack, worker=worker("idle_gpu.py"))
        assert [outcomes(times, i) for i in range(2)] == [[200, 200], [200]]
        assert times.restarts == 0

    def test_too_little_memory_skips_an_entry(
        self, write_pack: Write, worker: Worker, tmp_path: Path
    ) -> None:
        path, pack = write_pack(("a",))
        script = tmp_path / "small_gpu.py"
        text = Path(worker("idle_gpu.py")[-1]).read_text()
        script.write_text(text.replace("free=1 << 28", "free=300"))
        times = time_pack(path, pack, worker=(*worker("")[:-1], str(script)))
        assert times.results == {}
        assert "CUDA_ERROR_OUT_OF_MEMORY" in times.skipped[0]
