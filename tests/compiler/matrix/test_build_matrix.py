"""`build --matrix` on tiny models: a complete set, kept while nothing changes; packs for GPUs; refusals."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matrix_runs import GOOD, LIMITS, NOTHING_RUNS, listing, one_thread, statuses

from tapeout.compiler.build import build
from tapeout.compiler.matrix.build_matrix import COMPILE, MatrixRequest, build_matrix, explain_keys
from tapeout.compiler.matrix.results import MatrixReport
from tapeout.compiler.matrix.schema import load_matrix
from tapeout.compiler.progress import SilentProgress
from tapeout.plugins.errors import UsageError
from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine_set import load_index
from tapeout.runtime.tactic_timer.pack_file import read_pack


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


class TestCompileStage:
    def test_packs_for_gpus_that_lack_timings(
        self, matrix: Path, copied: Path, worker: tuple[str, ...]
    ) -> None:
        # What is packed is timed only afterwards.
        flags = {"require_timed": True}
        request = MatrixRequest(matrix, copied, stage=COMPILE, only=("a/*",), flags=flags)
        with one_thread():
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
