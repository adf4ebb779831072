"""`build --matrix` over a set that is there: what must be made again and why; repaired, never half there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matrix_runs import FRESH, GOOD, H200, LIMITS, NOTHING_RUNS, one_thread, statuses

from tapeout.compiler.matrix.build_matrix import MatrixRequest, build_matrix
from tapeout.compiler.matrix.content_key import factors_of, key_of, timings_factor
from tapeout.compiler.matrix.file_digests import FileDigests
from tapeout.compiler.matrix.results import MatrixReport
from tapeout.compiler.matrix.schema import load_matrix
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.progress import SilentProgress
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.runtime.engine import open_engine
from tapeout.runtime.engine_set import load_index


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
        assert {r.why for r in report.results} == {"there was no engine yet"}
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
            "a/cpu": "there was no engine yet",
        }

    def test_damaged_weights_are_everybodys(self, matrix: Path, copied: Path) -> None:
        (weights,) = (copied / "a").glob("*.weights.safetensors")
        weights.unlink()
        assert self.plan(matrix, copied) == dict.fromkeys(GOOD[:3], f"{weights.name} is missing")

    def test_an_index_that_cannot_be_read(self, matrix: Path, copied: Path) -> None:
        (copied / "a" / "index.json").write_text("{")
        assert self.plan(matrix, copied) == dict.fromkeys(GOOD[:3], "the index cannot be read")
        (copied / "a" / "index.json").unlink()
        assert self.plan(matrix, copied) == dict.fromkeys(GOOD[:3], "it was not in the index")

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


class TestRequireTimed:
    """Engines of GPUs in the set have default tactics."""

    def test_an_untimed_engine_does_not_stay(
        self, matrix: Path, copied: Path, worker: tuple[str, ...]
    ) -> None:
        engine, index = copied / "a" / "h200.engine", copied / "a" / "index.json"
        before = engine.read_bytes(), index.read_bytes()
        flags = {"require_timed": True}
        with one_thread():
            report = build_matrix(MatrixRequest(matrix, copied, only=("a/*0",), flags=flags), worker=worker)
        assert statuses(report) == {"a/h200": "failed", "a/sm_80": "failed"}
        assert report.exit_code == 2
        for result in report.results:
            assert result.message.startswith("require_timed: ")
            assert f"a/{result.name}.json: it does not exist" in result.message
        assert (engine.read_bytes(), index.read_bytes()) == before

    def test_of_one_target(self, checkpoints: Path, matrix: Path, copied: Path, tmp_path: Path) -> None:
        """In the file; a CPU's engine, which was timed while it was built, stays."""
        path = tmp_path / "m.yaml"
        path.write_text(
            f"defaults: {LIMITS}\nmodels: {{a: {checkpoints}/a}}\n"
            "targets: {'cuda:h200': {require-timed: true}, cpu: {require-timed: true}, 'cuda:sm_80': }"
        )
        report = build_matrix(MatrixRequest(path, copied, dry_run=True), worker=NOTHING_RUNS)
        assert statuses(report) == {"a/h200": "planned", "a/cpu": "kept", "a/sm_80": "kept"}
        assert report.results[0].why == "not timed, which require-timed asks for"


class TestRepair:
    def test_what_is_missing_is_made_and_the_rest_is_left(
        self, first: MatrixReport, matrix: Path, copied: Path
    ) -> None:
        """By a process that begins from nothing."""
        (copied / "a" / "sm_80.engine").unlink()
        kept = copied / "a" / "h200.engine"
        before = kept.stat().st_mtime_ns
        with one_thread():
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
        with one_thread():
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
        told: list[str] = []

        class Interrupt(SilentProgress):
            def info(self, text: str) -> None:
                told.append(text)
                if text.startswith("b/h200: built"):
                    os.kill(os.getpid(), signal.SIGINT)

        request = MatrixRequest(matrix, tmp_path / "set", only=("b/*",), workers=1)
        with pytest.raises(KeyboardInterrupt), one_thread():
            build_matrix(request, Interrupt(), worker=worker)
        folder = tmp_path / "set" / "b"
        assert [e.file for e in load_index(folder).engines] == ["h200.engine"]
        assert not list(folder.glob(".*"))
        assert "1 built, 1 left" in (tmp_path / "set" / "summary.md").read_text()
        assert told[0] == "b/h200: begins (there was no engine yet)"
        ends = r"b/h200: built \(there was no engine yet\), \d+\.\d s, 1 left"
        assert any(re.fullmatch(ends, text) for text in told), told
        report = build_matrix(replace(request, dry_run=True), worker=NOTHING_RUNS)
        assert statuses(report) == {"b/h200": "kept", "b/sm_80": "planned"}

    def test_old_weights_go_with_the_last_engine_that_needs_them(
        self, matrix: Path, copied: Path, models: Any, tmp_path: Path, worker: tuple[str, ...]
    ) -> None:
        models.make_tiny("llama", tmp_path / "new", seed=9)
        other = tmp_path / "other.yaml"
        other.write_text(f"defaults: {LIMITS}\nmodels: {{b: {tmp_path}/new}}\ntargets: ['cuda:sm_80']")
        before = {p.name for p in (copied / "b").glob("*.weights.safetensors")}
        with one_thread():
            report = build_matrix(MatrixRequest(other, copied), worker=worker)
        assert report.exit_code == 0
        index = load_index(copied / "b")
        assert [e.file for e in index.engines] == ["sm_80.engine"], "the index is of one checkpoint"
        assert {p.name for p in (copied / "b").glob("*.weights.safetensors")} == {index.weights[0].file}
        assert not before & {index.weights[0].file}


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
