"""Workflows: valid by GitHub's and GitLab's schemas, and made of scripts that are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def runs(path: Path) -> list[str]:
    return [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]


def check_schema(schema: str, *files: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def gitlab_example(folder: Path) -> Path:
    (text,) = re.findall(
        r"```yaml\n# \.gitlab-ci\.yml\n(.*?)```", (ROOT / "docs" / "ci.md").read_text(), re.S
    )
    path = folder / "gitlab-ci.yml"
    path.write_text(text)
    return path


def test_there_are_workflows() -> None:
    assert [p.name for p in WORKFLOWS] == ["ci.yml", "engines.yml"]


def test_github_takes_them() -> None:
    check_schema("vendor.github-workflows", *WORKFLOWS)


def test_gitlab_takes_the_example(tmp_path: Path) -> None:
    check_schema("vendor.gitlab-ci", gitlab_example(tmp_path))


def test_gitlab_starts_all_jobs_by_hand_or_none(tmp_path: Path) -> None:
    """`rules` of a job replace those it extends, and a job without any runs on every push."""
    file = yaml.safe_load(gitlab_example(tmp_path).read_text())
    jobs = {
        name: whole(file, name) for name in file if isinstance(file[name], dict) and "script" in file[name]
    }
    assert list(jobs) == ["compile", "time:h200", "finish"]
    assert all(job["rules"] == [{"if": '$CI_PIPELINE_SOURCE == "web"'}] for job in jobs.values())
    assert [job["stage"] for job in jobs.values()] == file["stages"]
    # Timings go along with the packs, and what is measured comes back beside them.
    assert jobs["compile"]["artifacts"]["paths"] == ["engines/packs", "timings"]
    assert jobs["time:h200"]["artifacts"]["paths"] == ["timed"]
    assert "--earlier timings" in jobs["time:h200"]["script"][0]
    assert jobs["finish"]["cache"]["paths"] == jobs["compile"]["cache"]["paths"]


def whole(file: dict[str, Any], name: str) -> dict[str, Any]:
    """A job with what it extends, as GitLab merges them: mappings key by key, lists as a whole."""
    job = dict(file[name])
    base = job.pop("extends", None)
    return {**whole(file, base), **job} if base else job


def test_timings_so_far_go_to_the_gpu_and_come_back_whole() -> None:
    path = ROOT / ".github" / "workflows" / "engines.yml"
    steps = {name: job["steps"] for name, job in jobs(path).items()}
    (sent,) = (
        s["with"]
        for s in steps["compile"]
        if s.get("with", {}).get("name") == "packs" and "path" in s["with"]
    )
    assert sent["path"].split() == ["engines/packs", "timings"]
    (timing,) = (s["run"] for s in steps["time"] if "ci/time.py" in s.get("run", ""))
    assert timing == 'ci/time.py run engines/packs timed "$GPU" --earlier timings'
    (back,) = (s["with"] for s in steps["time"] if s.get("uses", "").startswith("actions/upload"))
    assert back["path"] == "timed"


def test_the_projects_own_workflow_runs_what_everybody_runs() -> None:
    assert runs(ROOT / ".github" / "workflows" / "ci.yml") == [".ci/run"]


def test_stages_are_scripts_that_are_there(tmp_path: Path) -> None:
    lines = [
        line for text in runs(ROOT / ".github" / "workflows" / "engines.yml") for line in text.splitlines()
    ]
    lines += gitlab_example(tmp_path).read_text().splitlines()
    called = {name for line in lines for name in re.findall(r"\bci/[\w.]+", line)}
    assert called == {"ci/compile.sh", "ci/time.py", "ci/finish.sh", "ci/store.sh"}
    for name in called:
        assert os.access(ROOT / name, os.X_OK), name
    install = re.compile(r"pip\"? install |python3 -m venv|GITHUB_PATH")
    for text in runs(ROOT / ".github" / "workflows" / "engines.yml"):
        for line in text.splitlines():
            assert "ci/" in line or install.search(line), f"not a script and no installation: {line}"


@pytest.mark.parametrize("script", sorted((ROOT / "ci").glob("*.sh")), ids=lambda p: p.name)
def test_scripts_parse(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_expressions_name_what_is_there(path: Path) -> None:
    """`needs.JOB.outputs.NAME` is an output of a job that is waited for; `steps.ID` a step before."""
    for name, job in jobs(path).items():
        needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        text = yaml.safe_dump(job)
        for needed, output in re.findall(r"needs\.(\w+)\.outputs\.(\w+)", text):
            assert needed in needs, (name, needed)
            assert output in jobs(path)[needed]["outputs"], (name, output)
        assert set(re.findall(r"needs\.(\w+)\.", text)) <= set(needs)
        ids = {step.get("id") for step in job["steps"]}
        assert set(re.findall(r"steps\.(\w+)\.", text)) <= ids
        assert "timeout-minutes" in job, "a job that hangs ends by itself"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_nothing_from_outside_gets_into_a_shell(path: Path) -> None:
    """Inputs and the like reach scripts through the environment: an expression in a shell line is code."""
    assert not [text for text in runs(path) if "${{" in text]
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
