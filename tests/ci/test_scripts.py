"""The three stages of engines.yml, run by hand: compile, time, finish, publish, and fetch again.

Timing runs on a scripted GPU for cuda:sm_90, and for real on this machine's CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine_set import load_index

ROOT = Path(__file__).parents[2]
LIMITS = "{max-batch-size: 2, max-num-tokens: 4, max-seq-len: 64, tokens-per-page: 16}"


class Place:
    """A working directory with a matrix in it, and `tapeout` on the path: the command line CALL."""

    def __init__(self, folder: Path, call: tuple[str, ...], worker: tuple[str, ...]) -> None:
        self.folder = folder
        binaries = folder / "bin"
        binaries.mkdir()
        (binaries / "tapeout").write_text(f'#!/bin/sh\nexec {shlex.join(call)} "$@"\n')
        (binaries / "tapeout").chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "TEST_WORKER": json.dumps(worker),
            "GITHUB_STEP_SUMMARY": str(folder / "step.md"),
        }

    def run(self, *command: str, code: int = 0) -> str:
        done = subprocess.run(
            [str(ROOT / command[0]), *command[1:]],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


def make_tiny(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("tapeout_ci_models", ROOT / "tests" / "models.py")
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    models.make_tiny("llama", folder, seed=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, preloaded: Callable[[Path], tuple[str, ...]]) -> Place:
    folder = tmp_path_factory.mktemp("ci")
    make_tiny(folder / "llama")
    (folder / "engines.yaml").write_text(
        f"defaults: {LIMITS}\nmodels: {{tiny: ./llama}}\ntargets: [cpu, 'cuda:sm_90']\n"
    )
    worker = ROOT / "tests" / "compiler" / "matrix" / "worker_without_kernels.py"
    return Place(folder, preloaded(Path(__file__).with_name("tapeout_without_kernels.py")), preloaded(worker))


@pytest.fixture(scope="module")
def stages(place: Place) -> dict[str, str]:
    """What the stages print, in order."""
    told = {"compile": place.run("ci/compile.sh", "engines.yaml", "out", "timings")}
    told["gpus"] = place.run("ci/time.py", "gpus", "out/packs")
    for gpu in json.loads(told["gpus"]):
        told["time"] = place.run("ci/time.py", "run", "out/packs", "timings", gpu)
    told["finish"] = place.run("ci/finish.sh", "engines.yaml", "out", "timings")
    told["push"] = place.run("ci/store.sh", "push", "out", f"file://{place.folder}/store")
    return told


def test_only_gpus_are_timed_elsewhere(stages: dict[str, str], place: Place) -> None:
    assert json.loads(stages["gpus"]) == ["sm_90"]
    assert [p.name for p in (place.folder / "out" / "packs").glob("*/*.pack")] == ["sm_90.pack"]
    assert "NVIDIA H200" in stages["time"]


def test_engines_have_the_timings_of_both_machines(stages: dict[str, str], place: Place) -> None:
    index = load_index(place.folder / "out" / "tiny")
    assert {e.file: e.timed for e in index.engines} == {"cpu.engine": True, "sm_90.engine": True}
    caches = {p.name: json.loads(p.read_text())["entries"] for p in (place.folder / "timings").glob("*/*")}
    assert {e["gpu"]["name"] for e in caches["sm_90.json"].values()} == {"NVIDIA H200"}
    assert all("machine" in e for e in caches["cpu.json"].values())
    report = json.loads((place.folder / "out" / "tiny" / "sm_90.engine.report.json").read_text())
    assert all(t["cached"] and t["chosen"] for t in report["tactics"])


def test_the_page_of_the_run_gets_the_summary(stages: dict[str, str], place: Place) -> None:
    assert (place.folder / "step.md").read_text() == (place.folder / "out" / "summary.md").read_text()


def test_nothing_is_left_to_time(stages: dict[str, str], place: Place) -> None:
    told = place.run("ci/compile.sh", "engines.yaml", "out", "timings")
    assert "its timing cache answers everything" in told
    assert json.loads(place.run("ci/time.py", "gpus", "out/packs")) == []
    refused = place.run("ci/time.py", "run", "out/packs", "timings", "cuda:h200", code=2)
    assert "holds no pack for h200" in refused


def test_what_is_published_need_not_be_built(stages: dict[str, str], place: Place) -> None:
    """On another runner, with the timings: the set comes from the store and stays."""
    url = f"file://{place.folder}/store"
    place.run("ci/store.sh", "pull", "engines.yaml", "fresh", url)
    told = place.run("ci/finish.sh", "engines.yaml", "fresh", "timings")
    assert "2 kept in fresh" in told
    with LLM(place.folder / "fresh" / "tiny", target="cpu") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [7, 60, 23]}, params)
    assert len(output.outputs[0].token_ids) == 3


def test_timings_recorded_on_a_gpu_serve_where_there_is_none(place: Place) -> None:
    """Of an H200, by `tapeout time` with this model and these limits. Kernels changed since are not in it;
    the engine says so (`timed` is false) until the record is made again."""
    folder = place.folder / "recorded" / "tiny"
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("h200_tiny_llama.json"), folder / "sm_90.json")
    (place.folder / "gpu.yaml").write_text(
        f"defaults: {LIMITS}\nmodels: {{tiny: ./llama}}\ntargets: ['cuda:sm_90']\n"
    )
    place.run("ci/finish.sh", "gpu.yaml", "from-record", "recorded")
    report = json.loads((place.folder / "from-record" / "tiny" / "sm_90.engine.report.json").read_text())
    answered = [t["cached"] for t in report["tactics"]]
    assert any(answered)
    (engine,) = load_index(place.folder / "from-record" / "tiny").engines
    assert engine.timed == all(answered)


def test_a_store_with_nothing_in_it_is_no_failure(place: Place) -> None:
    told = place.run("ci/store.sh", "pull", "engines.yaml", "none", f"file://{place.folder}/no-store")
    assert "nothing fetched, all of it is built" in told


def test_an_engine_that_fails_fails_the_stage(place: Place) -> None:
    (place.folder / "bad.yaml").write_text("models: {gone: ./gone}\ntargets: [cpu]\n")
    told = place.run("ci/finish.sh", "bad.yaml", "bad", code=2)
    assert "no such file or directory" in told
    assert "## gone/cpu failed (2)" in (place.folder / "step.md").read_text()
    place.run("ci/store.sh", "push", "bad", f"file://{place.folder}/store", code=2)
