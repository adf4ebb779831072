"""From a model to a timed engine for a GPU: pack, time, finish; on a GPU machine all at once.

Nothing is compiled (see fake_kernels.py) and nothing is measured: a scripted worker tells times.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from fake_kernels import compile_nothing

from tapeout.cli.main import cli
from tapeout.compiler import cuda_plan, local_gpu, time_into_cache
from tapeout.compiler.build import build
from tapeout.compiler.build_pack import build_pack
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.report import BuildReport
from tapeout.compiler.tactics import gpu_decide, gpu_pack
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.plugins.cuda import KernelSpec
from tapeout.plugins.errors import EngineIncompatibleError, UnsupportedError, UsageError
from tapeout.runtime.engine import open_engine
from tapeout.runtime.executors.cuda import driver
from tapeout.runtime.tactic_timer.pack_file import read_pack
from tapeout.runtime.tactic_timer.session import time_pack

LIMITS = {"max_batch_size": 2, "max_num_tokens": 4, "max_seq_len": 64, "tokens_per_page": 16}
FLAGS = [part for name, value in LIMITS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
RUNTIME_TESTS = Path(__file__).parents[1] / "runtime"
pytestmark = pytest.mark.usefixtures("one_trace")
H200 = "NVIDIA H200 (sm_90, 132 multiprocessors, 141 GiB)"
WORKER = (sys.executable, str(RUNTIME_TESTS / "tactic_timer" / "scripted_worker.py"))


@pytest.fixture(scope="module", autouse=True)
def scripted() -> Iterator[None]:
    """No compiler, no GPU, and times by the names of tactics."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (gpu_pack, cuda_plan):
            patch.setattr(module, "compile_all", compile_nothing)
        for module in (time_into_cache, gpu_decide):
            patch.setattr(module, "time_pack", partial(time_pack, worker=WORKER))
        patch.setattr(driver, "open_device", _no_device)
        yield


def _no_device(ordinal: int = 0) -> Any:
    raise ImportError("this machine has no GPU")


@pytest.fixture(scope="module")
def checkpoint(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = models.make_tiny("llama", tmp_path_factory.mktemp("llama") / "model")
    return path


def run(*args: object) -> str:
    result = CliRunner().invoke(cli, [*map(str, args)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def pack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "llama.pack"
    told = run("build", checkpoint, "--target", "cuda:h200", "--dtype", "fp32", "--pack", path, *FLAGS)
    assert f"on the GPU: tapeout time {path} -o CACHE.json" in told
    return path


@pytest.fixture(scope="module")
def cache(pack: Path) -> Path:
    path = pack.with_name("h200.json")
    told = run("time", pack, "-o", path)
    count = read_pack(pack).pack.num_candidates
    assert f"{count} of {count} candidates timed, 0 lost" in told
    return path


@pytest.fixture(scope="module")
def cache_of_steps(pack: Path) -> Path:
    """In whole steps who is fast alone is slow."""
    path = pack.with_name("steps.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVERSED_STEPS", "1")
        told = run("time", pack, "-o", path)
    assert len([line for line in told.splitlines() if line.startswith("step of ")]) == 5
    assert "\nstep of 2 rows, decode: " in told
    return path


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path) -> Callable[..., tuple[Path, BuildReport]]:
    def make(**options: Any) -> tuple[Path, BuildReport]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.engine"
        made = BuildOptions(**{"target": "cuda:h200", "dtype": "float32", **LIMITS, **options})
        return path, build(str(checkpoint), path, made)

    return make


def test_an_engine_from_a_timing_cache(cache: Path, engine: Callable[..., tuple[Path, BuildReport]]) -> None:
    before = cache.read_bytes()
    path, report = engine(timing_cache=cache)
    assert report.timed
    assert report.warnings == ()
    for timing in report.tactics:
        assert timing.time_us == min([timing.time_us or 0.0, *timing.losers.values()])
    attention = [t for t in report.tactics if t.signature.startswith("rope_attention")]
    assert {t.kind for t in attention} == {"mixed", "decode"}
    with open_engine(path) as opened:
        assert opened.manifest.timed
        assert opened.launches is not None
        winners = {t.tactic for t in report.tactics if t.kind == "decode"}
        assert {r.tactic for row in opened.launches.decode_ranges.values() for r in row} == winners
    again, _ = engine(timing_cache=cache)
    assert again.read_bytes() == path.read_bytes()
    assert cache.read_bytes() == before
    shown = run("inspect", path)
    assert "tactics (µs by rows, * chosen, from " in shown
    (decode,) = (part for part in shown.split("steps that only decode\n")[1:])
    assert decode.startswith("    up to ")
    assert decode.splitlines()[1].split() == ["rows", "1", "2"]


def test_an_engine_of_whole_steps(
    cache_of_steps: Path, engine: Callable[..., tuple[Path, BuildReport]]
) -> None:
    path, report = engine(timing_cache=cache_of_steps)
    assert (report.timed, report.warnings) == (True, ())
    slower = [t for t in report.tactics if t.time_us and t.time_us > min(t.losers.values(), default=1e9)]
    assert slower
    assert {t.chosen for t in slower} == {"in a step"}
    assert {(s.kind, s.rows) for s in report.steps} == {
        ("decode", 1), ("decode", 2), ("mixed", 1), ("mixed", 2), ("mixed", 4)
    }  # fmt: skip
    assert any(s.changed and s.time_us and s.alone_us and s.time_us < s.alone_us for s in report.steps)
    again, _ = engine(timing_cache=cache_of_steps)
    assert again.read_bytes() == path.read_bytes()
    with open_engine(path) as opened:
        assert opened.launches is not None
        chosen = {t.tactic for t in report.tactics if t.kind == "decode"}
        assert {r.tactic for row in opened.launches.decode_ranges.values() for r in row} == chosen
    shown = run("inspect", path).splitlines()
    assert [f"  {step.text()}" for step in report.steps] == [li for li in shown if li.startswith("  step of")]


@pytest.fixture
def older_cache(tmp_path: Path) -> Callable[[Path], Path]:
    """A cache without its whole steps, as older versions wrote it."""

    def make(cache: Path) -> Path:
        data = json.loads(cache.read_text())
        kept = {key: entry for key, entry in data["entries"].items() if "order" not in entry}
        assert len(kept) < len(data["entries"])
        path = tmp_path / f"older-{cache.name}"
        path.write_text(json.dumps({**data, "entries": kept}))
        return path

    return make


def test_a_cache_without_whole_steps(
    cache: Path,
    cache_of_steps: Path,
    older_cache: Callable[[Path], Path],
    engine: Callable[..., tuple[Path, BuildReport]],
) -> None:
    """The fastest alone win, as where no step is faster with others."""
    path, report = engine(timing_cache=older_cache(cache))
    assert (report.timed, report.warnings, report.steps) == (True, (), ())
    assert {t.chosen for t in report.tactics} == {"alone"}
    assert path.read_bytes() == engine(timing_cache=cache)[0].read_bytes()
    path, report = engine(timing_cache=older_cache(cache_of_steps))
    assert {t.chosen for t in report.tactics} == {"alone"}
    assert path.read_bytes() != engine(timing_cache=cache_of_steps)[0].read_bytes()


def test_what_is_answered_is_not_asked_again(
    checkpoint: Path, cache: Path, cache_of_steps: Path, tmp_path: Path
) -> None:
    for number, known in enumerate((cache, cache_of_steps)):
        path = tmp_path / f"{number}.pack"
        options = BuildOptions(target="cuda:h200", dtype="float32", pack=path, timing_cache=known, **LIMITS)
        assert build_pack(str(checkpoint), options).entries == 0
        assert read_pack(path).pack.steps == ()


def test_batch_invariance_ignores_whole_steps(
    cache_of_steps: Path,
    older_cache: Callable[[Path], Path],
    engine: Callable[..., tuple[Path, BuildReport]],
) -> None:
    caches = (cache_of_steps, older_cache(cache_of_steps))
    built = [engine(timing_cache=known, batch_invariant=True) for known in caches]
    assert built[0][0].read_bytes() == built[1][0].read_bytes()
    assert built[0][1].steps == ()


def test_batch_invariance_takes_one_tactic(
    cache: Path, engine: Callable[..., tuple[Path, BuildReport]]
) -> None:
    path, report = engine(timing_cache=cache, batch_invariant=True)
    assert report.timed
    with open_engine(path) as opened:
        assert opened.launches is not None
        assert opened.launches.decode_ranges == {}
        assert all(len({r.tactic for r in row}) == 1 for row in opened.launches.ranges.values())


def test_a_cache_that_knows_a_part(
    checkpoint: Path, cache: Path, tmp_path: Path, engine: Callable[..., tuple[Path, BuildReport]]
) -> None:
    """Of other limits; what does not depend on them still serves."""
    path, report = engine(timing_cache=cache, max_batch_size=3)
    assert not report.timed
    (warning,) = report.warnings
    known = sum(t.time_us is not None for t in report.tactics)
    assert f"timing cache {cache} answers " in warning
    assert " candidates for cuda:h200 (NVIDIA H200); " in warning
    assert warning.endswith(f"{len(report.tactics) - known} of {len(report.tactics)} choices are defaults")
    assert 0 < known < len(report.tactics)
    assert "tactics (partly timed; µs by rows" in run("inspect", path)
    # A pack for those limits holds what is missing, and what stands beside it in a step.
    rest = tmp_path / "rest.pack"
    options = BuildOptions(
        target="cuda:h200", dtype="float32", pack=rest, timing_cache=cache, **{**LIMITS, "max_batch_size": 3}
    )
    build_pack(str(checkpoint), options)
    left = read_pack(rest).pack
    packed = {(e.signature, e.kind, e.rows) for e in left.entries}
    assert {(t.signature, t.kind, t.rows) for t in report.tactics if t.time_us is None} < packed
    assert packed == {
        (e.signature, e.kind, e.rows) for step in left.steps for e in map(left.entries.__getitem__, step.ops)
    }
    assert len(left.steps) == 3 + 3


def test_a_cache_of_another_gpu(cache: Path, engine: Callable[..., tuple[Path, BuildReport]]) -> None:
    _, report = engine(timing_cache=cache, target="cuda:h100")
    assert report.warnings == (
        "tactics for cuda:h100 are defaults, nothing was timed",
        f"timing cache {cache} has no timings that serve cuda:h100: it holds those of {H200}",
    )


def test_a_cache_that_is_not_there(cache: Path, engine: Callable[..., tuple[Path, BuildReport]]) -> None:
    missing = cache.with_name("typo.json")
    _, report = engine(timing_cache=missing, target="cuda:h100")
    assert report.warnings[1:] == (
        f"timing cache {missing} has no timings that serve cuda:h100: it does not exist",
    )
    assert not missing.exists()


class TestRequireTimed:
    """`--require-timed`: no engine from default tactics."""

    @pytest.mark.parametrize("dry_run", [False, True])
    def test_a_misspelt_cache_fails_before_anything_is_written(
        self, checkpoint: Path, tmp_path: Path, dry_run: bool
    ) -> None:
        flags = ["--target", "cuda:h200", "--dtype", "fp32", *FLAGS, "-o", str(tmp_path / "m.engine")]
        flags += ["--timing-cache", str(tmp_path / "typo.json"), "--require-timed"]
        flags += ["--dry-run"] if dry_run else []
        result = CliRunner().invoke(cli, ["build", str(checkpoint), *flags])
        assert result.exit_code == 2
        told = re.search(
            r"require_timed: (\d+) of (\d+) candidates for cuda:h200 have no time, (\d+) of (\d+) choices "
            rf"would be defaults; timing cache {tmp_path}/typo.json: it does not exist\n",
            result.stderr,
        )
        assert told is not None, result.stderr
        assert told[1] == told[2] != "0"
        assert told[3] == told[4] != "0"
        hint = result.stderr[told.end() :]
        for part in (
            "build MODEL --target cuda:h200 --pack",
            f"time FILE.pack -o {tmp_path}/typo.json",
            "Or le",
        ):
            assert part in hint
        assert list(tmp_path.iterdir()) == []

    def test_without_a_cache(self, engine: Callable[..., tuple[Path, BuildReport]]) -> None:
        with pytest.raises(UsageError, match=r"no timing cache was given$"):
            engine(require_timed=True)

    @pytest.mark.parametrize("dry_run", [False, True])
    def test_an_engine_whose_tactics_were_timed(
        self, cache: Path, engine: Callable[..., tuple[Path, BuildReport]], dry_run: bool
    ) -> None:
        path, report = engine(timing_cache=cache, require_timed=True, dry_run=dry_run)
        assert report.timed
        if not dry_run:
            assert path.read_bytes() == engine(timing_cache=cache)[0].read_bytes(), (
                "it is no part of the engine"
            )

    def test_some_times_do_not_suffice(
        self, cache: Path, tmp_path: Path, engine: Callable[..., tuple[Path, BuildReport]]
    ) -> None:
        data = json.loads(cache.read_text())
        name = next(k for k, e in data["entries"].items() if "order" not in e)
        rest = tmp_path / "rest.json"
        rest.write_text(
            json.dumps({**data, "entries": {k: e for k, e in data["entries"].items() if k != name}})
        )
        with pytest.raises(UsageError, match=f"timing cache {rest} answers the others alone$") as told:
            engine(timing_cache=rest, require_timed=True)
        untimed, candidates = map(int, re.findall(r"\d+", told.value.message)[:2])
        assert 0 < untimed < candidates

    def test_a_cpu_is_timed_while_building(
        self, tmp_path: Path, engine: Callable[..., tuple[Path, BuildReport]]
    ) -> None:
        _, report = engine(
            target="cpu", require_timed=True, dry_run=True, timing_cache=tmp_path / "none.json"
        )
        assert report.dry_run

    def test_a_pack_holds_what_is_untimed(self, checkpoint: Path, tmp_path: Path) -> None:
        flags = ["--target", "cuda:h200", "--pack", str(tmp_path / "m.pack"), "--require-timed"]
        result = CliRunner().invoke(cli, ["build", str(checkpoint), *flags])
        assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
        assert "--require-timed is for engines" in result.stderr


class TestHere:
    """A machine with a GPU."""

    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        monkeypatch.syspath_prepend(RUNTIME_TESTS / "executors")

        def plug_in(**facts: Any) -> None:
            from fake_cuda import FakeCuda

            monkeypatch.setattr(driver, "cu", FakeCuda(**facts))
            monkeypatch.setattr(driver, "open_device", lambda ordinal=0: driver.Device(ordinal))

        return plug_in

    def test_what_is_unknown_is_timed(
        self, gpu: Callable[..., None], tmp_path: Path, engine: Callable[..., tuple[Path, BuildReport]]
    ) -> None:
        gpu(free=141 << 29)  # half of it, as the fake has it
        kept = tmp_path / "kept.json"
        path, report = engine(timing_cache=kept)
        assert report.timed
        assert report.warnings == ()
        with open_engine(path) as opened:
            assert opened.manifest.timed
        (gpu_name,) = {e["gpu"]["name"] for e in TimingCache.load(kept).entries.values()}
        assert gpu_name == "NVIDIA H200"

    def test_what_is_known_is_not(
        self,
        gpu: Callable[..., None],
        cache: Path,
        monkeypatch: pytest.MonkeyPatch,
        engine: Callable[..., tuple[Path, BuildReport]],
    ) -> None:
        gpu(free=141 << 29)
        monkeypatch.setattr(gpu_decide, "time_pack", None)
        _, report = engine(timing_cache=cache)
        assert report.timed

    def test_another_gpu_is_not_used(self, gpu: Callable[..., None]) -> None:
        for name, sm in (("NVIDIA L4", 89), ("NVIDIA H100", 90), ("NVIDIA H200 MIG 1g.18gb", 90)):
            gpu(name=name, sm=sm)
            assert local_gpu.local_gpu("cuda:h200", 90) is None
            assert (local_gpu.local_gpu("cuda:sm_90", 90) is None) == (sm != 90)

    def test_a_gpu_that_cannot_is_told(
        self,
        gpu: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
        engine: Callable[..., tuple[Path, BuildReport]],
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise EngineIncompatibleError("its driver is for CUDA 11.4")

        gpu()
        monkeypatch.setattr(gpu_decide, "time_pack", refuse)
        _, report = engine()
        assert report.warnings[0] == "nothing was timed on this machine's GPU: its driver is for CUDA 11.4"
        assert not report.timed
        with pytest.raises(UsageError, match=r"require_timed: (.|\n)*driver is for CUDA 11\.4"):
            engine(require_timed=True)

    def test_a_dry_run_knows_that_it_would_be_timed(
        self, gpu: Callable[..., None], engine: Callable[..., tuple[Path, BuildReport]]
    ) -> None:
        gpu()
        assert not engine(require_timed=True, dry_run=True)[1].timed


class TestSharedMemory:
    """Defaults whose kernels turn out too large."""

    def test_the_next_one_is_taken(
        self, monkeypatch: pytest.MonkeyPatch, engine: Callable[..., tuple[Path, BuildReport]]
    ) -> None:
        _, report = engine()
        first = {t.signature: t.tactic for t in report.tactics if t.signature.startswith("norm_linear")}
        assert len(set(first.values())) >= 1

        def shared(spec: KernelSpec) -> int:
            return 232449 if spec.function == "gemv" else 0

        monkeypatch.setattr(cuda_plan, "compile_all", partial(compile_nothing, shared_bytes=shared))
        path, report = engine()
        assert any("gemv" in name for name in first.values())
        taken = {t.tactic for t in report.tactics if t.signature.startswith("norm_linear")}
        assert taken
        assert not any("gemv" in name for name in taken)
        rejected = {n: r for t in report.tactics for n, r in t.rejected.items() if "gemv" in n}
        assert "gemv takes 232449 bytes of shared memory a block, sm_90 has 232448" in rejected.values()
        with open_engine(path) as opened:
            assert opened.launches is not None
            assert "gemv" not in {k.symbol for k in opened.launches.kernels}

    def test_when_none_fits_the_build_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, engine: Callable[..., tuple[Path, BuildReport]]
    ) -> None:
        large = partial(compile_nothing, shared_bytes=lambda spec: 1 << 20)
        monkeypatch.setattr(cuda_plan, "compile_all", large)
        with pytest.raises(UnsupportedError, match=r"no CUDA tactic on sm_90 for these ops") as caught:
            engine()
        assert "takes 1048576 bytes of shared memory a block" in caught.value.message
