"""`tapeout time`: what it prints, writes and refuses; and that a machine without torch can run it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tapeout.cli.main import cli
from tapeout.compiler import time_into_cache
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings, StepOutcome, gpus_in, plan_digest
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.runtime.tactic_timer.pack import Pack, WholeStep
from tapeout.runtime.tactic_timer.session import time_pack

Write = Callable[..., tuple[Path, Pack]]
Worker = Callable[[str], tuple[str, ...]]
CRASH = "the process ended with SIGSEGV while checking crash"
H200 = Gpu("NVIDIA H200", 90, 132, 141)
COMMAND = """
import functools, sys
from tapeout.compiler import time_into_cache as command
command.time_pack = functools.partial(command.time_pack, worker=sys.argv.pop(1).split("|"))
from tapeout.cli.main import main
try:
    main()
finally:
    print("loaded", *sys.modules, file=sys.stderr)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, worker: Worker) -> Callable[..., Result]:
    """Runs the command in this process, with the scripted worker or another."""

    def run(*args: object, with_worker: str = "scripted_worker.py") -> Result:
        timing = functools.partial(time_pack, worker=worker(with_worker))
        monkeypatch.setattr(time_into_cache, "time_pack", timing)
        return CliRunner().invoke(cli, ["time", *map(str, args)])

    return run


def test_winners_and_losers_are_told_and_kept(
    write_pack: Write, run: Callable[..., Result], tmp_path: Path
) -> None:
    pack, _ = write_pack(("slow50", "fast3", "wrong", "crash"), ("only8",))
    cache = tmp_path / "cache.json"
    result = run(pack, "-o", cache)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[:2] == [
        "lost: wrong of add0(float32[T,16]) at T = 4, mixed: output out: 3 of 8 elements differ",
        f"lost: crash of add0(float32[T,16]) at T = 4, mixed: {CRASH}",
    ]
    assert f"{H200.text()}: 3 of 5 candidates timed, 2 lost, 1 restarts" in result.stdout
    assert result.stdout.endswith(f"wrote {cache}\n")
    timings = GpuTimings(TimingCache.load(cache), H200)
    place = ("add0(float32[T,16])", "mixed", "", 4)
    assert timings.get(*place, "fast3:0") == Outcome(3)
    assert timings.get(*place, "crash:0") == Outcome(None, CRASH)


def test_what_is_lost_for_one_reason_is_told_once(
    write_pack: Write, run: Callable[..., Result], tmp_path: Path
) -> None:
    pack, _ = write_pack(("wrong", "a1"), ("b2", "wrong"), ("wrong", "crash", "c3"))
    result = run(pack, "-o", tmp_path / "cache.json")
    assert [line for line in result.stdout.splitlines() if line.startswith("lost")] == [
        "lost: wrong at 3 places: output out: 3 of 8 elements differ",
        f"lost: crash of add2(float32[T,16]) at T = 4, mixed: {CRASH}",
    ]
    assert "3 of 7 candidates timed, 4 lost, 1 restarts" in result.stdout


class TestWholeSteps:
    ENTRIES = (("first100~150", "second104"), ("third50",))
    STEPS = (WholeStep("mixed", "", 4, (0, 1, 0), ()), WholeStep("decode", "batch 2", 4, (1,), ()))

    def test_a_line_a_bucket(self, write_pack: Write, run: Callable[..., Result], tmp_path: Path) -> None:
        pack, _ = write_pack(*self.ENTRIES, steps=self.STEPS)
        result = run(pack, "-o", tmp_path / "cache.json")
        mixed, decode = result.stdout.splitlines()[:2]
        assert mixed == (
            "step of 4 rows, mixed: 350.0 us with the fastest alone, 258.0 us (26.3% less) with others for "
            "2 of 3 ops"
        )
        assert decode == "step of 4 rows, decode: 50.0 us with the fastest alone, which stay"

    def test_times_and_winners_are_kept(
        self, write_pack: Write, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        pack, _ = write_pack(*self.ENTRIES, steps=self.STEPS)
        data = json.loads(run(pack, "-o", tmp_path / "cache.json", "--json").stdout)
        assert data["steps"][0] == {
            "kind": "mixed", "rows": 4, "time_us": 258.0, "alone_us": 350.0, "changed": 2, "ops": 3,
            "reason": None,
        }  # fmt: skip
        timings = GpuTimings(TimingCache.load(tmp_path / "cache.json"), H200)
        add0, add1 = (f"add{i}(float32[T,16])" for i in range(2))
        times = {add0: {"first100~150:0": 100.0, "second104:0": 104.0}, add1: {"third50:1": 50.0}}
        outcome = timings.get_step((add0, add1, add0), "mixed", "", 4, plan_digest(times, frozenset()))
        assert outcome == StepOutcome(258, 350, {add0: "second104:0", add1: "third50:1"})

    def test_a_fault_is_kept_as_a_reason(
        self, write_pack: Write, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        """And all that was timed before it."""
        pack, _ = write_pack(("a100~crash",), ("b50",), steps=self.STEPS)
        result = run(pack, "-o", tmp_path / "cache.json")
        reason = "the process ended with SIGSEGV while timing the whole step at T = 4, mixed"
        assert result.stdout.splitlines()[0] == f"step of 4 rows, mixed: not timed: {reason}"
        assert "2 of 2 candidates timed, 0 lost, 1 restarts" in result.stdout
        timings = GpuTimings(TimingCache.load(tmp_path / "cache.json"), H200)
        assert timings.get("add0(float32[T,16])", "mixed", "", 4, "a100~crash:0") == Outcome(100)
        add0, add1 = (f"add{i}(float32[T,16])" for i in range(2))
        plans = plan_digest({add0: {"a100~crash:0": 100.0}, add1: {"b50:1": 50.0}}, frozenset())
        outcome = timings.get_step((add0, add1, add0), "mixed", "", 4, plans)
        assert outcome == StepOutcome(None, reason=reason)

    def test_what_is_skipped_is_not_kept(
        self, write_pack: Write, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        pack, _ = write_pack(("wrong",), ("b50",), steps=self.STEPS[:1])
        result = run(pack, "-o", tmp_path / "cache.json")
        assert "warning: skipped the whole step at T = 4, mixed: nothing was timed" in result.stdout
        entries = TimingCache.load(tmp_path / "cache.json").entries.values()
        assert not [entry for entry in entries if "order" in entry]


def test_json_is_one_document(write_pack: Write, run: Callable[..., Result], tmp_path: Path) -> None:
    pack, _ = write_pack(("slow50", "fast3", "wrong"))
    result = run(pack, "-o", tmp_path / "cache.json", "--json")
    data = json.loads(result.stdout)
    assert data["entries"] == [
        {
            "signature": "add0(float32[T,16])", "kind": "mixed", "rows": 4, "tactic": "fast3",
            "times_us": {"fast3": 3.0, "slow50": 50.0},
            "rejected": {"wrong": "output out: 3 of 8 elements differ"},
        }
    ]  # fmt: skip
    assert (data["timed"], data["candidates"], data["restarts"], data["skipped"]) == (2, 3, 0, {})
    assert result.stderr == ""


def test_timings_that_are_there_are_kept(
    write_pack: Write, run: Callable[..., Result], tmp_path: Path
) -> None:
    cache = TimingCache.load(tmp_path / "cache.json")
    GpuTimings(cache, Gpu("NVIDIA L4", 89, 58, 22)).put("s", "mixed", "", 1, "hash", "a", Outcome(1.0))
    cache.save()
    assert run(write_pack(("a1",))[0], "-o", tmp_path / "cache.json").exit_code == 0
    both = TimingCache.load(tmp_path / "cache.json")
    assert [g.name for sm in (89, 90) for g in gpus_in(both, sm)] == ["NVIDIA L4", "NVIDIA H200"]


class TestEarlierTimings:
    """`--timing-cache`: a pack of what changed, timed on another machine than the earlier timings are on."""

    PLACE = ("add0(float32[T,16])", "mixed", "", 4)
    H100 = Gpu("NVIDIA H100 80GB HBM3", 90, 132, 80)

    def earlier(self, path: Path, gpu: Gpu = H200) -> Path:
        cache = TimingCache.load(path)
        timings = GpuTimings(cache, gpu)
        timings.put(*self.PLACE, "a1:0", "a1", Outcome(70.0))  # the pack times it again
        timings.put(*self.PLACE, "old:0", "old", Outcome(5.0))
        timings.put("other", "mixed", "", 8, "kept", "b", Outcome(None, "wrong"))
        cache.save()
        return path

    def test_they_stay_and_newer_ones_win(
        self, write_pack: Write, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        earlier = self.earlier(tmp_path / "earlier.json")
        before = earlier.read_bytes()
        result = run(write_pack(("a1",))[0], "-o", tmp_path / "cache.json", "--timing-cache", earlier)
        assert result.exit_code == 0, result.stderr
        timings = GpuTimings(TimingCache.load(tmp_path / "cache.json"), H200)
        assert timings.get(*self.PLACE, "a1:0") == Outcome(1)
        assert timings.get(*self.PLACE, "old:0") == Outcome(5)
        assert timings.get("other", "mixed", "", 8, "kept") == Outcome(None, "wrong")
        assert earlier.read_bytes() == before

    def test_what_the_output_holds_is_newer(
        self, write_pack: Write, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        cache = TimingCache.load(tmp_path / "cache.json")
        GpuTimings(cache, H200).put(*self.PLACE, "old:0", "old", Outcome(4.0))
        cache.save()
        earlier = self.earlier(tmp_path / "earlier.json")
        run(write_pack(("a1",))[0], "-o", tmp_path / "cache.json", "--timing-cache", earlier)
        timings = GpuTimings(TimingCache.load(tmp_path / "cache.json"), H200)
        assert timings.get(*self.PLACE, "old:0") == Outcome(4)

    def test_of_another_gpu_that_the_target_could_mean(
        self, write_pack: Write, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        """Before anything is timed: an engine for sm_90 could be built from neither of the two."""
        earlier, cache = self.earlier(tmp_path / "earlier.json", self.H100), tmp_path / "cache.json"
        pack, _ = write_pack(("a1",), target="cuda:sm_90")
        result = run(pack, "-o", cache, "--timing-cache", earlier, with_worker="idle_gpu.py")
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{earlier} holds timings of {self.H100.text()}, this GPU is NVIDIA H200" in result.stderr
        assert "cuda:sm_90 could mean both" in result.stderr
        assert "hint: time on the same model, or remove that file" in result.stderr
        assert not cache.exists()

    def test_a_target_that_names_its_model_does_not_mean_others(
        self, write_pack: Write, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        earlier, cache = self.earlier(tmp_path / "earlier.json", self.H100), tmp_path / "cache.json"
        assert run(write_pack(("a1",))[0], "-o", cache, "--timing-cache", earlier).exit_code == 0
        assert gpus_in(TimingCache.load(cache), 90) == [self.H100, H200]

    def test_they_must_be_there(self, write_pack: Write, run: Callable[..., Result], tmp_path: Path) -> None:
        result = run(write_pack(("a1",))[0], "-o", tmp_path / "c.json", "--timing-cache", tmp_path / "none")
        assert result.exit_code == 2
        assert "none' does not exist" in result.stderr
        (tmp_path / "text").write_text("text")
        result = run(write_pack(("a1",))[0], "-o", tmp_path / "c.json", "--timing-cache", tmp_path / "text")
        assert result.exit_code == 2
        assert "is not a timing cache" in result.stderr
        assert not (tmp_path / "c.json").exists()


class TestRefusals:
    """Told before anything is timed; nothing is written."""

    @pytest.fixture(autouse=True)
    def nothing_changes(self, write_pack: Write, tmp_path: Path) -> None:
        self.pack, _ = write_pack(("a",))
        self.tmp_path = tmp_path

    def refused(self, result: Result, code: int, words: str, *, cache: bool = False) -> None:
        assert (result.exit_code, result.stdout) == (code, ""), result.stderr
        assert words in result.stderr
        assert "hint: " in result.stderr
        assert (self.tmp_path / "cache.json").exists() == cache

    def test_packs(self, run: Callable[..., Result]) -> None:
        data, cache = self.pack.read_bytes(), self.tmp_path / "cache.json"
        self.refused(run(self.tmp_path / "none", "-o", cache), 2, "No such file")
        self.pack.write_bytes(data[:-5])
        self.refused(run(self.pack, "-o", cache), 3, "truncated")
        self.pack.write_bytes(data.replace(b'"pack_version":"3"', b'"pack_version":"9"'))
        self.refused(run(self.pack, "-o", cache), 3, "has pack version 9, this tapeout reads 3")
        self.pack.write_bytes(b"text")
        self.refused(run(self.pack, "-o", cache), 3, "not a pack")

    def test_gpus(self, run: Callable[..., Result], write_pack: Write) -> None:
        pack, _ = write_pack(("a",), sm=80)
        cache = self.tmp_path / "cache.json"
        self.refused(run(pack, "-o", cache, with_worker="idle_gpu.py"), 3, "kernels for sm_80")
        pack, _ = write_pack(("a",))
        result = run(pack, "-o", cache, "--device", 1, with_worker="idle_gpu.py")
        self.refused(result, 3, "no usable NVIDIA GPU")

    def test_outputs(self, run: Callable[..., Result]) -> None:
        before = self.pack.read_bytes()
        self.refused(run(self.pack, "-o", self.pack), 2, "is the pack, which would be lost")
        assert self.pack.read_bytes() == before
        self.refused(run(self.pack, "-o", self.tmp_path / "gone" / "cache.json"), 2, "gone")
        self.refused(run(self.pack, "-o", self.tmp_path), 2, "directory")
        (self.tmp_path / "cache.json").write_text("notes")
        result = run(self.pack, "-o", self.tmp_path / "cache.json")
        self.refused(result, 2, "is not a timing cache", cache=True)
        assert (self.tmp_path / "cache.json").read_text() == "notes"


def test_neither_process_loads_a_framework(write_pack: Write, worker: Worker, tmp_path: Path) -> None:
    pack, _ = write_pack(("a", "b"))
    loaded, cache = tmp_path / "loaded", tmp_path / "cache.json"
    start = [sys.executable, "-c", COMMAND, "|".join(worker("idle_gpu.py"))]
    command = [*start, "time", str(pack), "-o", str(cache)]
    environment = {**os.environ, "IDLE_GPU_LOADED": str(loaded)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "2 of 2 candidates timed, 0 lost, 0 restarts" in done.stdout
    assert gpus_in(TimingCache.load(cache), 90) == [Gpu("NVIDIA H200", 90, 132, 0)]  # the fake is small
    heavy = {"torch", "triton", "transformers", "onnx", "safetensors"}
    child = set(loaded.read_text().split())
    parent = set(done.stderr.rpartition("loaded ")[2].split())
    assert "tapeout.runtime.tactic_timer.timing" in child
    assert "tapeout.runtime.tactic_timer.session" in parent
    assert not heavy & child
    assert not heavy & parent
    assert "tapeout.compiler" not in child
