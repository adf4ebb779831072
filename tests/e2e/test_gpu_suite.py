"""The machinery of tests/gpu where there is no GPU: making families' parts, the archive, and the judgement.

A CPU engine stands in for the GPU's: the same code makes it, unpacks it, asks it and compares.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import gpu_families
import make_families
from gpu_bfloat16 import near_ties
from gpu_bundle import ENGINES, Bundle, open_bundle, pack_engines
from gpu_cases import Answer, differences
from gpu_families import ANSWERS, FAMILIES, LIMITS, family_file, wrong_answers

FAMILY = "qwen2"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """An engine of the family, and what it is to answer."""
    folder = tmp_path_factory.mktemp("parts")
    engine = folder / family_file(FAMILY).engine
    return engine, make_families.make_family(FAMILY, "cpu", engine, folder)


@pytest.fixture
def bundle(made: tuple[Path, dict], tmp_path: Path) -> Bundle:
    engine, answers = made
    pack_engines([engine], tmp_path / ENGINES)
    (tmp_path / ANSWERS).write_text(json.dumps({FAMILY: answers}))
    (tmp_path / "bundle.json").write_text("{}")
    found = open_bundle(tmp_path, tmp_path / "unpacked")
    assert found is not None
    return found


def change(bundle: Bundle, round_: int, **values: object) -> None:
    known = bundle.json(ANSWERS)
    known[FAMILY]["answers"][round_][0].update(values)
    bundle.path(ANSWERS).write_text(json.dumps(known))


def test_an_equal_engine_passes(bundle: Bundle) -> None:
    assert wrong_answers(bundle, FAMILY) == []


def test_another_engine_fails(bundle: Bundle, tmp_path: Path) -> None:
    """The same family with other weights."""
    checkpoint = make_families.write_checkpoint(family_file(FAMILY), 1, tmp_path / "model")
    other = tmp_path / "other.engine"
    make_families.build_tiny(str(checkpoint), other, "cpu", tmp_path / "timings.json", **LIMITS)
    shutil.copyfile(other, bundle.path(family_file(FAMILY).engine))
    assert len(wrong_answers(bundle, FAMILY)) >= 4  # every request


def test_one_other_id_fails(bundle: Bundle) -> None:
    ids = bundle.json(ANSWERS)[FAMILY]["answers"][3][0]["ids"]
    change(bundle, 3, ids=[*ids[:-1], ids[-1] + 1])
    (problem,) = wrong_answers(bundle, FAMILY)
    assert problem.startswith("round 3, request 0: from token 11 on")


def test_a_step_that_never_occurs_fails(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    case = family_file(FAMILY).case()
    monkeypatch.setattr(
        gpu_families.FamilyFile, "case", lambda self, seed: replace(case, steps=case.steps | {"other"})
    )
    assert wrong_answers(bundle, FAMILY) == ["no other step"]


@pytest.mark.parametrize(("logprob", "wrong"), [(-7.0005, 0), (-7.1, 1), (math.nan, 1), (None, 1)])
def test_log_probabilities_are_compared(logprob: float | None, wrong: int) -> None:
    want = Answer([1, 2], -7.0, "length")
    assert len(differences([[replace(want, logprob=logprob)]], [[want]])) == wrong


def test_other_ids_are_right_at_near_ties_alone() -> None:
    """Hugging Face's gap is at most twice its bfloat16's error, where the ids first differ."""
    known = {
        name: {"greedy": [5, 6, 7], "gaps": [9.0, gap, 9.0], "bf16_errors": [0.1, 0.1, 0.1]}
        for name, gap in {"same": 9.0, "tie": 0.2, "decided": 0.21}.items()
    }
    lines, wrong = near_ties(known, {"same": [5, 6, 7], "tie": [5, 8, 1], "decided": [5, 8, 7]})
    assert [line.split(",")[0] for line in lines] == ["tie: token 1", "decided: token 1"]
    assert wrong == lines[1:]


def test_the_record_decides_which_families_run() -> None:
    results = json.loads((gpu_families.FOLDER / "results.json").read_text())["results"]
    exact = {r["family"] for r in results if r["parity"] == "exact"}
    assert set(FAMILIES) | set(gpu_families.REFUSED) == exact
    assert len(FAMILIES) == len(set(FAMILIES)) > 70


def test_prompts_are_longer_than_windows_and_fit_the_engines() -> None:
    for name in FAMILIES:
        file = family_file(name)
        longest = max(file.prompt_lengths)
        assert longest > 64, name  # windows are 16 tokens, original contexts 64
        assert longest + file.new_tokens < LIMITS["max_seq_len"], name
        assert len(file.prompt_lengths) <= LIMITS["max_batch_size"], name


def test_equal_engines_make_equal_archives(tmp_path: Path) -> None:
    paths = []
    for name in ("b.engine", "a.engine"):
        paths.append(tmp_path / name)
        paths[-1].write_bytes(b"cubin" * 999)
    pack_engines(paths, tmp_path / "one")
    pack_engines(reversed(paths), tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "one").stat().st_size < 1000


def test_what_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    made = make_families.make_part("diffllama", "cpu", tmp_path, tmp_path / "work")
    assert "attends more than once in layers 0, 1" in made.problem
    assert list(tmp_path.glob("*.engine")) == []


def test_a_refused_family_that_builds_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_families, "REFUSED", {FAMILY: "no kernel"})
    made = make_families.make_part(FAMILY, "cpu", tmp_path, tmp_path / "work")
    assert f"{FAMILY} can be built for cpu" in made.problem
