"""The three stages of engines.yml, run by hand: compile, time, finish, publish, and fetch again.

Timing runs on a scripted GPU for cuda:sm_90, and for real on this machine's CPU.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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


@pytest.fixture(scope="module")
def place(
    models: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
    preloaded: Callable[[Path], tuple[str, ...]],
) -> Place:
    folder = tmp_path_factory.mktemp("ci")
    models.make_tiny("llama", folder / "llama")
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


@pytest.mark.parametrize(
    "command",
    [
        ("compile.sh",), ("compile.sh", "m.yaml"), ("finish.sh", "m.yaml"),
        ("store.sh",), ("store.sh", "gone"), ("store.sh", "pull", "m.yaml", "out"),
        ("store.sh", "push", "out"), ("store.sh", "push", "out", "u", "v"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_missing_arguments_are_told_before_anything_runs(command: tuple[str, ...], tmp_path: Path) -> None:
    script = [str(ROOT / "ci" / command[0]), *command[1:]]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: expected ")
    assert script[0] in done.stderr, "where it is described"
    assert not list(tmp_path.iterdir())


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
    assert "holds no pack for h200; packs that are there: none at all\nhint: " in refused


def test_what_changed_alone_is_timed_and_the_rest_stays(stages: dict[str, str], place: Place) -> None:
    """As after a change of one kernel: the GPU job has earlier timings and a pack of what they lack."""
    whole = json.loads((place.folder / "timings" / "tiny" / "sm_90.json").read_text())
    gone = next(key for key, entry in whole["entries"].items() if entry.get("kind") == "mixed")
    left = {key: entry for key, entry in whole["entries"].items() if key != gone}
    earlier = write_timings(place.folder / "earlier", {**whole, "entries": left})
    place.run("ci/compile.sh", "engines.yaml", "partial", "earlier")
    run = ("ci/time.py", "run", "partial/packs", "timed", "sm_90", "--earlier", "earlier")
    assert "NVIDIA H200" in place.run(*run)
    merged = json.loads((place.folder / "timed" / "tiny" / "sm_90.json").read_text())["entries"]
    assert merged.keys() == whole["entries"].keys()
    assert merged[gone]["signature"] == whole["entries"][gone]["signature"]
    assert all(merged[key]["rows"].keys() >= entry["rows"].keys() for key, entry in left.items())
    assert [f.name for f in (place.folder / "timed").glob("*/*")] == ["sm_90.json"], (
        "what others timed is theirs"
    )
    assert json.loads(earlier.read_text())["entries"].keys() == left.keys()
    shutil.copytree(place.folder / "timed", place.folder / "earlier", dirs_exist_ok=True)
    assert "its timing cache answers everything" in place.run(
        "ci/compile.sh", "engines.yaml", "partial", "earlier"
    )


def test_timings_of_another_gpu_are_refused_by_name(stages: dict[str, str], place: Place) -> None:
    whole = (place.folder / "timings" / "tiny" / "sm_90.json").read_text()
    write_timings(place.folder / "moved", json.loads(whole.replace("NVIDIA H200", "NVIDIA H100 PCIe")))
    place.run("ci/compile.sh", "engines.yaml", "elsewhere", "moved")
    run = ("ci/time.py", "run", "elsewhere/packs", "timed-elsewhere", "sm_90", "--earlier", "moved")
    told = place.run(*run, code=2)
    assert "holds timings of NVIDIA H100 PCIe" in told
    assert "this GPU is NVIDIA H200" in told
    assert not list((place.folder / "timed-elsewhere").glob("*/*"))
    # Where they stand in the folder itself, too.
    shutil.copytree(place.folder / "moved", place.folder / "timed-elsewhere", dirs_exist_ok=True)
    assert "this GPU is NVIDIA H200" in place.run(*run[:-2], code=2)


def test_a_pack_that_fails_keeps_no_other_from_being_timed(stages: dict[str, str], place: Place) -> None:
    place.run("ci/compile.sh", "engines.yaml", "two", "timed-never")
    packs, made = place.folder / "two" / "packs", place.folder / "two" / "packs" / "tiny"
    for model in ("a-damaged", "b-whole", "c-without-note"):
        shutil.copytree(made, packs / model)
    shutil.rmtree(made)
    damaged = packs / "a-damaged" / "sm_90.pack"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    (packs / "c-without-note" / "sm_90.pack.key.json").unlink()
    told = place.run("ci/time.py", "run", "two/packs", "timed-two", "sm_90", code=3)
    assert "truncated" in told
    assert [f.parent.name for f in (place.folder / "timed-two").glob("*/*.json")] == ["b-whole"]
    (packs / "b-whole" / "sm_90.pack.key.json").write_text("[]")
    told = place.run("ci/time.py", "gpus", "two/packs", code=1)
    assert "sm_90.pack.key.json is not what `tapeout build --stage compile` notes" in told
    assert "Traceback" not in told


def write_timings(folder: Path, data: object) -> Path:
    path = folder / "tiny" / "sm_90.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))
    return path


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
