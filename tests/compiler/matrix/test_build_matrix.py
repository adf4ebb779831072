"""`build --matrix` on tiny models: sets that are complete, reused, repaired and never half there.

Build processes are the real ones, but that no kernel is compiled (worker_without_kernels.py) and that all but
one are forked from a process with their imports done (fork_server.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tapeout.compiler.build import build
from tapeout.compiler.matrix.build_matrix import COMPILE, MatrixRequest, build_matrix, explain_keys
from tapeout.compiler.matrix.content_key import factors_of, key_of, timings_factor
from tapeout.compiler.matrix.file_digests import FileDigests
from tapeout.compiler.matrix.results import MatrixReport
from tapeout.compiler.matrix.schema import load_matrix
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.progress import SilentProgress
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.errors import UsageError
from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine import open_engine
from tapeout.runtime.engine_set import load_index
from tapeout.runtime.tactic_timer.pack_file import read_pack

PROGRAM = Path(__file__).with_name("worker_without_kernels.py")
FRESH = (sys.executable, str(PROGRAM))
NOTHING_RUNS = (sys.executable, "-c", "raise SystemExit('a build process was started')")
LIMITS = "{max-batch-size: 2, max-num-tokens: 4, max-seq-len: 64, tokens-per-page: 16}"
H200 = Gpu("NVIDIA H200", 90, 132, 141)


@pytest.fixture(scope="module")
def checkpoints(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `a` and `b`, of one shape and other weights."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        models.make_tiny("llama", folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def matrix(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five engines that can be built; one of a model that is not there, one of no model that we know."""
    (checkpoints / "odd").mkdir()
    (checkpoints / "odd" / "config.json").write_text('{"model_type": "hexapod"}')
    path = tmp_path_factory.mktemp("matrix") / "engines.yaml"
    path.write_text(
        f"""
        defaults: {LIMITS}
        models: {{a: {checkpoints}/a, b: {checkpoints}/b, gone: {checkpoints}/gone, odd: {checkpoints}/odd}}
        targets: ["cuda:h200", cpu, "cuda:sm_80"]
        exclude: [{{model: b, target: cpu}}, {{model: gone}}, {{model: odd}}]
        include: [{{model: gone, target: cpu}}, {{model: odd, target: cpu}}]
        """
    )
    return path


@contextmanager
def no_network() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def worker(preloaded: Callable[[Path], tuple[str, ...]]) -> tuple[str, ...]:
    """The command of a build process."""
    return preloaded(PROGRAM)


@pytest.fixture(scope="module")
def first(matrix: Path, worker: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> MatrixReport:
    """The first run, into a directory that is not there yet."""
    request = MatrixRequest(matrix, tmp_path_factory.mktemp("set") / "engines", workers=1)
    with no_network():
        return build_matrix(request, worker=worker)


@pytest.fixture
def copied(first: MatrixReport, tmp_path: Path) -> Path:
    """The set of the first run, somewhere else."""
    return Path(shutil.copytree(first.output, tmp_path / "copy"))


def statuses(report: MatrixReport) -> dict[str, str]:
    return {r.title: r.status for r in report.results}


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


GOOD = ["a/h200", "a/cpu", "a/sm_80", "b/h200", "b/sm_80"]


class TestFirstRun:
    def test_failures_stop_nothing_and_are_told(self, first: MatrixReport) -> None:
        assert statuses(first) == {**dict.fromkeys(GOOD, "built"), "gone/cpu": "failed", "odd/cpu": "failed"}
        by_title = {r.title: r for r in first.results}
        assert (by_title["gone/cpu"].exit_code, by_title["odd/cpu"].exit_code) == (2, 5)
        assert "no such file or directory" in by_title["gone/cpu"].message
        assert "hexapod" in by_title["odd/cpu"].message
        assert first.exit_code == 2

    def test_what_was_not_timed_is_told_once(self, first: MatrixReport) -> None:
        assert sorted(w for w in first.warnings if w.startswith("a/")) == [
            f"a/{name}: tactics for cuda:{name} are defaults, nothing was timed" for name in ("h200", "sm_80")
        ]

    def test_the_set_is_what_the_index_lists(self, first: MatrixReport) -> None:
        for model, engines in (("a", ["cpu", "h200", "sm_80"]), ("b", ["h200", "sm_80"])):
            index = load_index(first.output / model)
            assert (index.model, [e.file for e in index.engines]) == (model, [f"{e}.engine" for e in engines])
            assert len(index.weights) == 1, "weights are written once"
            for name, (size, _) in index.files().items():
                assert (first.output / model / name).stat().st_size == size
            sides = [f"{e}.engine{s}" for e in engines for s in ("", ".key.json", ".report.json")]
            assert listing(first.output / model) == sorted([*sides, "index.json", index.weights[0].file])
        sources = {load_index(first.output / m).source for m in "ab"}
        assert len(sources) == 2

    def test_a_model_is_traced_once(self, first: MatrixReport) -> None:
        stages = {r.title: r.details["stage_seconds"] for r in first.results if r.status == "built"}
        for model in "ab":
            assert sum("trace" in s for t, s in stages.items() if t.startswith(model)) == 1
        # Of "a" those for CUDA run as soon as the CPU's tactics are timed, so that kernels can begin.
        assert {t for t, s in stages.items() if "passes" in s} == {"a/cpu", "b/h200"}
        assert {t for t, s in stages.items() if "ahead" in s} == {"a/cpu"}
        assert {t for t, s in stages.items() if "parity" in s} == {"a/cpu"}

    @pytest.mark.parametrize("title", ["a/cpu", "a/sm_80"])
    def test_an_engine_is_what_a_build_alone_makes(
        self, first: MatrixReport, matrix: Path, tmp_path: Path, title: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from fake_kernels import compile_nothing

        from tapeout.compiler import cuda_plan

        monkeypatch.setattr(cuda_plan, "compile_all", compile_nothing)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        (spec,) = (s for s in load_matrix(matrix, {}) if s.title == title)
        cache = first.output / "timings" / f"{title}.json"
        report = build(spec.source, tmp_path / "m.engine", replace(spec.options, timing_cache=cache))
        there = first.output / spec.model / spec.file
        assert report.engine.read_bytes() == there.read_bytes()
        assert {p.name for p in tmp_path.glob("*.weights.safetensors")} == {
            w.file for w in load_index(there.parent).weights
        }

    def test_it_runs(self, first: MatrixReport) -> None:
        with LLM(first.output / "a" / "cpu.engine") as llm:
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            (output,) = llm.generate({"prompt_token_ids": [7, 60, 23]}, params)
        assert len(output.outputs[0].token_ids) == 4

    def test_summaries(self, first: MatrixReport) -> None:
        assert (first.output / "summary.md").read_text() == first.markdown()
        top = ElementTree.fromstring((first.output / "junit.xml").read_text())
        assert (top.get("tests"), top.get("failures")) == ("7", "2")

    def test_nothing_in_the_set_knows_where_it_was_made(self, first: MatrixReport, checkpoints: Path) -> None:
        for model in "ab":
            for name in load_index(first.output / model).files().keys() | {"index.json"}:
                content = (first.output / model / name).read_bytes()
                for path in (checkpoints, first.output, Path.home()):
                    assert str(path).encode() not in content, name


class TestNothingChanged:
    def test_no_process_is_started(self, first: MatrixReport, matrix: Path, copied: Path) -> None:
        report = build_matrix(MatrixRequest(matrix, copied, only=("a/*", "b/*")), worker=NOTHING_RUNS)
        assert statuses(report) == dict.fromkeys(GOOD, "kept")
        assert report.exit_code == 0
        assert {r.why for r in report.results} == {"unchanged"}
        old = {r.title: (r.key, r.sha256) for r in first.results}
        assert all((r.key, r.sha256) == old[r.title] for r in report.results)

    def test_a_model_that_moved(
        self, first: MatrixReport, matrix: Path, checkpoints: Path, copied: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(checkpoints / "b", tmp_path / "moved")
        other = tmp_path / "other.yaml"
        other.write_text(f"defaults: {LIMITS}\nmodels: {{b: {tmp_path}/moved}}\ntargets: ['cuda:h200']")
        report = build_matrix(MatrixRequest(other, copied), worker=NOTHING_RUNS)
        assert statuses(report) == {"b/h200": "kept"}
        assert len(load_index(copied / "b").engines) == 2, "others of the set stay listed"

    def test_keys_are_explained(self, first: MatrixReport, matrix: Path, copied: Path) -> None:
        request = MatrixRequest(matrix, copied, only=("a/*",))
        explained = {e.title: e for e in explain_keys(request)}
        keys = {
            f"a/{e.file.removesuffix('.engine')}": e.content_key for e in load_index(copied / "a").engines
        }
        assert {title: e.key for title, e in explained.items()} == keys
        assert explained["a/cpu"].factors["option.max_batch_size"] == "2"
        assert explained["a/cpu"].factors["timings"] != "none"
        assert explained["a/sm_80"].factors["timings"] == "none"
        (copied / "a" / "cpu.engine").unlink()
        assert next(e.key for e in explain_keys(request) if e.title == "a/cpu") is None
        changed = replace(request, flags={"seed": 9})
        assert {e.key for e in explain_keys(changed)} == {None}


class TestWhatMustBeMade:
    def plan(self, matrix: Path, output: Path, **flags: Any) -> dict[str, str]:
        """What a dry run would build, and why; writes nothing."""
        before = {p: p.stat().st_mtime_ns for p in output.rglob("*")}
        request = MatrixRequest(matrix, output, only=("a/*",), flags=flags, dry_run=True)
        report = build_matrix(request, worker=NOTHING_RUNS)
        assert {p: p.stat().st_mtime_ns for p in output.rglob("*")} == before
        assert {r.status for r in report.results} <= {"planned", "kept"}
        return {r.title: r.why for r in report.results if r.status == "planned"}

    def test_nothing(self, matrix: Path, copied: Path) -> None:
        assert self.plan(matrix, copied) == {}

    def test_everything_in_an_empty_place(self, matrix: Path, tmp_path: Path) -> None:
        request = MatrixRequest(matrix, tmp_path / "none", only=("a/*",), dry_run=True)
        report = build_matrix(request, worker=NOTHING_RUNS)
        assert {r.why for r in report.results} == {"not built yet"}
        assert not (tmp_path / "none").exists()

    def test_options_that_changed(self, matrix: Path, copied: Path) -> None:
        why = "changed: option.max_batch_size, option.seed"
        assert self.plan(matrix, copied, max_batch_size=1, seed=5) == dict.fromkeys(GOOD[:3], why)

    def test_damage(self, matrix: Path, copied: Path) -> None:
        engine = copied / "a" / "h200.engine"
        data = bytearray(engine.read_bytes())
        data[len(data) // 2] ^= 1
        engine.write_bytes(data)
        (copied / "a" / "sm_80.engine").write_bytes(b"short")
        (copied / "a" / "cpu.engine").unlink()
        assert self.plan(matrix, copied) == {
            "a/h200": "h200.engine is not the file that the index lists",
            "a/sm_80": "sm_80.engine is not the file that the index lists",
            "a/cpu": "not built yet",
        }

    def test_damaged_weights_are_everybodys(self, matrix: Path, copied: Path) -> None:
        (weights,) = (copied / "a").glob("*.weights.safetensors")
        weights.unlink()
        assert self.plan(matrix, copied) == dict.fromkeys(GOOD[:3], f"{weights.name} is missing")

    def test_an_index_that_cannot_be_read(self, matrix: Path, copied: Path) -> None:
        (copied / "a" / "index.json").write_text("{")
        assert self.plan(matrix, copied) == dict.fromkeys(GOOD[:3], "the index cannot be read")
        (copied / "a" / "index.json").unlink()
        assert self.plan(matrix, copied) == dict.fromkeys(GOOD[:3], "not in the index")

    def test_timings_that_count(self, matrix: Path, copied: Path) -> None:
        """Of this GPU, for this engine's ops under its limits; nothing else in the file."""
        cache = copied / "timings" / "a" / "h200.json"
        with open_engine(copied / "a" / "h200.engine") as engine:
            key, signature = next(iter(engine.program.signatures.items()))
        assert signature.op

        def put(gpu: Gpu = H200, signature: str = key, conditions: str = "") -> dict[str, str]:
            timings = TimingCache.load(cache if cache.exists() else None)
            timings.path = cache
            GpuTimings(timings, gpu).put(signature, "mixed", conditions, 1, "0" * 32, "t", Outcome(1.0))
            timings.save()
            return self.plan(matrix, copied)

        assert put(gpu=replace(H200, name="NVIDIA A100-SXM4-80GB", sm=80)) == {}
        assert put(signature="add(another)") == {}
        assert put(conditions="batch 77") == {}
        assert put() == {"a/h200": "changed: timings"}


class TestRepair:
    def test_what_is_missing_is_made_and_the_rest_is_left(
        self, first: MatrixReport, matrix: Path, copied: Path
    ) -> None:
        """By a process that begins from nothing."""
        (copied / "a" / "sm_80.engine").unlink()
        kept = copied / "a" / "h200.engine"
        before = kept.stat().st_mtime_ns
        with no_network():
            report = build_matrix(MatrixRequest(matrix, copied, only=("a/*",)), worker=FRESH)
        assert statuses(report) == {"a/h200": "kept", "a/cpu": "kept", "a/sm_80": "built"}
        assert kept.stat().st_mtime_ns == before
        for name in ("sm_80.engine", "index.json"):
            assert (copied / "a" / name).read_bytes() == (first.output / "a" / name).read_bytes()

    def test_a_process_that_dies(
        self, matrix: Path, copied: Path, worker: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What it was at has failed; what stands there, and the others, are whole."""
        monkeypatch.setenv("TEST_DOOMED", "b/h200")
        request = MatrixRequest(matrix, copied, only=("b/*",), flags={"seed": 1})
        with no_network():
            report = build_matrix(request, worker=worker)
        assert statuses(report) == {"b/h200": "failed", "b/sm_80": "built"}
        assert report.exit_code == 1
        assert "SIGABRT" in report.results[0].message
        index = load_index(copied / "b")
        assert [e.file for e in index.engines] == ["h200.engine", "sm_80.engine"]
        assert not list((copied / "b").glob(".*"))

    def test_an_interrupt_leaves_what_is_done_and_no_half_of_anything(
        self, matrix: Path, tmp_path: Path, worker: tuple[str, ...]
    ) -> None:
        class Interrupt(SilentProgress):
            def info(self, text: str) -> None:
                if text.startswith("b/h200: built"):
                    os.kill(os.getpid(), signal.SIGINT)

        request = MatrixRequest(matrix, tmp_path / "set", only=("b/*",), workers=1)
        with pytest.raises(KeyboardInterrupt), no_network():
            build_matrix(request, Interrupt(), worker=worker)
        folder = tmp_path / "set" / "b"
        assert [e.file for e in load_index(folder).engines] == ["h200.engine"]
        assert not list(folder.glob(".*"))
        assert "1 built, 1 left" in (tmp_path / "set" / "summary.md").read_text()
        report = build_matrix(replace(request, dry_run=True), worker=NOTHING_RUNS)
        assert statuses(report) == {"b/h200": "kept", "b/sm_80": "planned"}

    def test_old_weights_go_with_the_last_engine_that_needs_them(
        self, matrix: Path, copied: Path, models: Any, tmp_path: Path, worker: tuple[str, ...]
    ) -> None:
        models.make_tiny("llama", tmp_path / "new", seed=9)
        other = tmp_path / "other.yaml"
        other.write_text(f"defaults: {LIMITS}\nmodels: {{b: {tmp_path}/new}}\ntargets: ['cuda:sm_80']")
        before = {p.name for p in (copied / "b").glob("*.weights.safetensors")}
        with no_network():
            report = build_matrix(MatrixRequest(other, copied), worker=worker)
        assert report.exit_code == 0
        index = load_index(copied / "b")
        assert [e.file for e in index.engines] == ["sm_80.engine"], "the index is of one checkpoint"
        assert {p.name for p in (copied / "b").glob("*.weights.safetensors")} == {index.weights[0].file}
        assert not before & {index.weights[0].file}


class TestCompileStage:
    def test_packs_for_gpus_that_lack_timings(
        self, matrix: Path, copied: Path, worker: tuple[str, ...]
    ) -> None:
        request = MatrixRequest(matrix, copied, stage=COMPILE, only=("a/*",))
        with no_network():
            report = build_matrix(request, worker=worker)
        assert statuses(report) == {"a/h200": "built", "a/cpu": "kept", "a/sm_80": "built"}
        for name in ("h200", "sm_80"):
            pack = read_pack(copied / "packs" / "a" / f"{name}.pack").pack
            assert pack.target == f"cuda:{name}"
            assert pack.entries
        again = build_matrix(request, worker=NOTHING_RUNS)
        assert statuses(again) == {"a/h200": "kept", "a/cpu": "kept", "a/sm_80": "kept"}
        (copied / "packs" / "a" / "sm_80.pack").write_bytes(b"short")
        third = build_matrix(replace(request, dry_run=True), worker=NOTHING_RUNS)
        assert {r.title: r.why for r in third.results if r.status == "planned"} == {
            "a/sm_80": "the pack is missing or damaged"
        }


class TestRefusals:
    def test_two_runs_in_one_place(self, matrix: Path, copied: Path) -> None:
        request = MatrixRequest(matrix, copied, only=("b/*",))

        class Second(SilentProgress):
            refused: str = ""

            def info(self, text: str) -> None:
                try:
                    build_matrix(request, worker=NOTHING_RUNS)
                except UsageError as error:
                    Second.refused = error.message

        build_matrix(request, Second(), worker=NOTHING_RUNS)
        assert "another run is building" in Second.refused

    def test_timings_that_are_not_there(self, matrix: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"--timings: .* is no directory"):
            build_matrix(MatrixRequest(matrix, tmp_path / "o", timings=tmp_path / "none"))
        assert not (tmp_path / "o").exists()

    def test_an_output_that_is_a_file(self, matrix: Path, tmp_path: Path) -> None:
        (tmp_path / "o").write_text("mine")
        with pytest.raises(UsageError, match="--output"):
            build_matrix(MatrixRequest(matrix, tmp_path / "o", only=("b/*",)), worker=NOTHING_RUNS)
        assert (tmp_path / "o").read_text() == "mine"


def test_the_key_of_another_host(first: MatrixReport, matrix: Path, tmp_path: Path) -> None:
    """Timings of another processor of the same level leave the key alone where the file holds both."""
    spec = next(s for s in load_matrix(matrix, {}) if s.title == "a/cpu")
    cache = tmp_path / "cpu.json"
    shutil.copy(first.output / "timings" / "a" / "cpu.json", cache)
    options: BuildOptions = replace(spec.options, timing_cache=cache)
    with open_engine(first.output / "a" / "cpu.engine") as engine:
        program, limits = engine.program, engine.manifest.limits
    index = load_index(first.output / "a")
    digest: Callable[[], str] = lambda: timings_factor(options, program, limits)  # noqa: E731
    factors = factors_of(spec, FileDigests(tmp_path / "memory.json"))
    entry = next(e for e in index.engines if e.file == "cpu.engine")
    assert key_of({**factors, "timings": digest()}) == entry.content_key
    before = digest()
    data = json.loads(cache.read_text())
    some = next(iter(data["entries"].values()))
    data["entries"]["other kernels"] = {**some, "machine": {**some["machine"], "kernels": "0"}}
    cache.write_text(json.dumps(data))
    assert digest() == before
    data["entries"]["other cpu"] = {**some, "machine": {**some["machine"], "cpu": "Another"}}
    cache.write_text(json.dumps(data))
    assert digest() != before, "what chose on another machine chooses, too"
