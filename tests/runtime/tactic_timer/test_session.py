"""Timing outlives what candidates do to its worker; nothing but the candidate is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tapeout.plugins.errors import EngineIncompatibleError, TapeoutError
from tapeout.runtime.tactic_timer.pack import Pack, WholeStep
from tapeout.runtime.tactic_timer.results import PackTimes, Result, StepResult
from tapeout.runtime.tactic_timer.session import time_pack

Write = Callable[..., tuple[Path, Pack]]
Worker = Callable[[str], tuple[str, ...]]


@pytest.fixture
def timed(write_pack: Write, worker: Worker) -> Callable[..., PackTimes]:
    """Times entries with candidates of these names, by the scripted worker."""

    def run(*entries: tuple[str, ...], **options: object) -> PackTimes:
        path, pack = write_pack(*entries, steps=options.pop("steps", ()))
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
        ("hang", "no answer within 3 s while checking hang"),
    ],
)
def test_a_fault_costs_one_candidate(timed: Callable[..., PackTimes], name: str, reason: str) -> None:
    """The entry is begun again without it; entries that are done are not."""
    start = time.monotonic()
    times = timed(("first1",), ("a4", name, "b5"), ("last6",), step_timeout_s=3 if name == "hang" else 60)
    assert outcomes(times, 0) == [1]
    assert outcomes(times, 1) == [4, reason, 5]
    assert outcomes(times, 2) == [6]
    assert times.restarts == 1
    assert time.monotonic() - start < 300  # a candidate that hangs does so for 600 s


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


STEP = WholeStep("mixed", "", 4, (0, 1, 0, 1), ())
OTHER = WholeStep("decode", "", 4, (1, 0), (1,))


class TestSteps:
    """Whole steps, after all that is timed alone."""

    def test_who_is_fastest_alone_may_lose(self, timed: Callable[..., PackTimes]) -> None:
        told: list[str] = []
        entries = ("first100~150", "second104"), ("third50", "far90~1")
        times = timed(*entries, steps=(STEP, OTHER), progress=told.append)
        assert outcomes(times, 0) == [100, 104]
        assert times.steps == {
            0: StepResult(2 * (104 + 50), 2 * (150 + 50), {0: 1, 1: 0}),
            1: StepResult(104 + 50, 150 + 50, {0: 1, 1: 0}),
        }
        assert (times.skipped_steps, times.restarts) == ({}, 0)
        assert told[2:] == [
            "1 of 2: the whole step at T = 4, mixed",
            "2 of 2: the whole step at T = 4, decode",
        ]

    def test_who_is_fixed_stays(self, timed: Callable[..., PackTimes]) -> None:
        times = timed(("a100", "b101"), ("c50~90", "d51"), steps=(STEP, OTHER))
        assert [step.winners for step in times.steps.values()] == [{0: 0, 1: 1}, {0: 0, 1: 0}]

    @pytest.mark.parametrize(
        ("how", "reason"),
        [
            ("crash", "the process ended with SIGSEGV while timing the whole step at T = 4, mixed"),
            ("fault", "CUDA_ERROR_ILLEGAL_ADDRESS while timing the whole step at T = 4, mixed"),
            ("hang", "no answer within 1 s while timing the whole step at T = 4, mixed"),
        ],
    )
    def test_a_fault_costs_one_step(self, timed: Callable[..., PackTimes], how: str, reason: str) -> None:
        """Nothing that was told before is timed again: the next worker is told it."""
        only_first = WholeStep("decode", "", 4, (0, 0), ())
        told: list[str] = []
        times = timed(
            ("a100~150", "b104"), (f"c50~{how}",), steps=(STEP, only_first), step_timeout_s=1,
            progress=told.append,
        )  # fmt: skip
        assert [outcomes(times, i) for i in range(2)] == [[100, 104], [50]]
        assert times.steps == {0: StepResult(None, reason=reason), 1: StepResult(208, 300, {0: 1})}
        assert times.restarts == 1
        assert len([text for text in told if "add" in text]) == 2

    def test_a_later_worker_knows_algorithms(self, timed: Callable[..., PackTimes]) -> None:
        """A fault in the first step, so that the second is another process's."""
        of_product = WholeStep("decode", "", 4, (1,), ())
        times = timed(("a1~crash",), ("cublaslt",), steps=(STEP, of_product))
        assert times.steps[1] == StepResult(1, 1, {1: 0})
        assert times.results[1, 0].algorithm is not None

    def test_what_nobody_can_compute_is_no_step(self, timed: Callable[..., PackTimes]) -> None:
        times = timed(("wrong",), ("a1",), steps=(STEP,))
        assert (times.steps, times.skipped_steps) == ({}, {0: "nothing was timed"})


class TestStepsOfTheRealWorker:
    """On a driver that times a kernel by what runs before it."""

    @pytest.fixture
    def timed(self, write_pack: Write, worker: Worker) -> Callable[..., PackTimes]:
        def run(*entries: tuple[str, ...], steps: tuple[WholeStep, ...]) -> PackTimes:
            path, pack = write_pack(*entries, steps=steps)
            return time_pack(path, pack, worker=worker("neighbour_gpu.py"))

        return run

    def test_the_other_one_is_chosen(self, timed: Callable[..., PackTimes]) -> None:
        entries = ("deep100~150", "flat110"), ("only30",), ("left20", "right21~18")
        step = WholeStep("mixed", "", 4, (0, 1, 0, 2, 1), ())
        times = timed(*entries, steps=(step,))
        assert [outcomes(times, i) for i in range(3)] == [[100, 110], [30], [20, 21]]
        assert times.steps == {0: StepResult(298, 380, {0: 1, 1: 0, 2: 1})}
        assert times.restarts == 0

    def test_a_launch_that_fails_costs_the_step(self, timed: Callable[..., PackTimes]) -> None:
        other = WholeStep("decode", "", 4, (1, 1), ())
        times = timed(("a100~fails",), ("b30",), steps=(STEP, other))
        assert times.steps == {
            0: StepResult(None, reason="CUDA: launching a step: fails"),
            1: StepResult(60, 60, {1: 0}),
        }
        assert times.restarts == 0

    def test_a_broken_context_costs_the_step(self, timed: Callable[..., PackTimes]) -> None:
        other = WholeStep("decode", "", 4, (1, 1), ())
        times = timed(("a100~breaks",), ("b30",), steps=(STEP, other))
        reason = "CUDA: launching a step: breaks while timing the whole step at T = 4, mixed"
        assert times.steps == {0: StepResult(None, reason=reason), 1: StepResult(60, 60, {1: 0})}
        assert [outcomes(times, i) for i in range(2)] == [[100], [30]]
        assert times.restarts == 1

    def test_too_little_memory_skips_the_step(
        self, timed: Callable[..., PackTimes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is timed alone fits."""
        monkeypatch.setenv("FREE_IN_STEPS", "300")
        times = timed(("a100",), ("b30",), steps=(STEP,))
        assert [outcomes(times, i) for i in range(2)] == [[100], [30]]
        assert times.steps == {}
        assert "CUDA_ERROR_OUT_OF_MEMORY" in times.skipped_steps[0]


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
