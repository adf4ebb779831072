"""`tapeout refit`: another checkpoint's weights in an engine, as a build would have made them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from refit_command import invoke

from tapeout.compiler.build import build
from tapeout.compiler.refit import refit
from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine import open_engine
from tapeout.runtime.engine_set import load_index

pytestmark = pytest.mark.usefixtures("one_trace")


def weights_of(path: Path) -> dict[str, bytes]:
    with open_engine(path) as engine:
        return {name: bytes(engine.weight(name).data) for name in engine.weights}


def greedy(engine: Path) -> list[int]:
    with LLM(engine) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return list(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)


def test_an_engine_has_the_weights_that_a_build_gives_it(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.engine"
    result = invoke("refit", built / "base.engine", "--weights", built / "tuned", "-o", out)
    assert result.exit_code == 0, result.stderr
    assert "outputs: finite and not zero" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out.engine"]
    assert weights_of(out) == weights_of(built / "tuned.engine") != weights_of(built / "base.engine")
    assert greedy(out) == greedy(built / "tuned.engine") != greedy(built / "base.engine")
    with open_engine(out) as new, open_engine(built / "base.engine") as old:
        new.verify_all()
        assert new.program == old.program
        assert new.kernel_names == old.kernel_names
        assert new.manifest.timed == old.manifest.timed
        with open_engine(built / "tuned.engine") as fresh:
            assert new.manifest.model.checkpoint == fresh.manifest.model.checkpoint
            assert new.manifest.weights["digest"] == fresh.manifest.weights["digest"]
        assert new.manifest.weights["refit"] == {
            "built_from": old.manifest.model.checkpoint,
            "engine": old.digest,
        }
        assert new.manifest.parity == {"verdict": "refit", "outputs": "finite and not zero"}
    shown = invoke("inspect", out).stdout
    assert "built from" in shown
    assert "finite and not zero" in shown


@pytest.mark.usefixtures("unrun")
def test_back_and_forth_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    there = refit(built / "base.engine", str(built / "tuned"), tmp_path / "there.engine")
    back = refit(tmp_path / "there.engine", str(built / "base"), tmp_path / "back.engine")
    assert weights_of(tmp_path / "back.engine") == weights_of(built / "base.engine")
    with open_engine(built / "base.engine") as old:
        # However often: what was built is what the plan and the tactics were made with.
        assert there.built_from == back.built_from == old.manifest.model.checkpoint == back.checkpoint
    again = refit(built / "base.engine", str(built / "tuned"), tmp_path / "again.engine")
    assert again.checkpoint == there.checkpoint
    assert (tmp_path / "again.engine").read_bytes() == (tmp_path / "there.engine").read_bytes()


@pytest.mark.usefixtures("unrun")
def test_an_engine_for_a_gpu_that_shares_its_weights(
    built: Path, options: Callable[..., Any], tmp_path: Path
) -> None:
    engine = tmp_path / "gpu.engine"
    shared = options(
        target="cuda:sm_90", dtype="bfloat16", weights="shared", tokens_per_page=16, verify=False
    )
    build(str(built / "base"), engine, shared)
    (before,) = tmp_path.glob("*.safetensors")
    done = refit(engine, str(built / "tuned"), tmp_path / "out.engine")
    new = done.files[1]
    assert new != before
    assert {p.name for p in tmp_path.glob("*.safetensors")} == {new.name, before.name}
    with open_engine(engine) as old, open_engine(done.files[0]) as opened:
        opened.verify_all()
        assert opened.launches == old.launches
        assert opened.manifest.weights["file"] == new.name
    again = refit(engine, str(built / "tuned"), tmp_path / "second.engine")
    assert again.weights_reused


@pytest.mark.usefixtures("unrun")
def test_a_set_shares_its_new_weights_and_is_whole_or_not_there(
    built: Path, options: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "tiny", tmp_path / "mine"
    old.mkdir()
    for target in ("cpu", "cuda:sm_90"):
        shared = options(target=target, dtype="bfloat16", weights="shared", tokens_per_page=16, verify=False)
        build(str(built / "base"), old / f"{target.removeprefix('cuda:')}.engine", shared)
    args = ("refit", old, "--weights", built / "tuned")
    with monkeypatch.context() as patch:
        interrupted = Mock(side_effect=[DEFAULT, KeyboardInterrupt], wraps=refit)
        patch.setattr("tapeout.compiler.refit_set.refit", interrupted)
        assert invoke(*args, "-o", new).exit_code == 130
    assert interrupted.call_count == 2
    assert list(tmp_path.iterdir()) == [old], "no half of a set"
    refused_here = invoke(*args)
    assert refused_here.exit_code == 2
    assert "give --output DIR" in refused_here.stderr
    result = invoke(*args, "-o", new)
    assert result.exit_code == 0, result.stderr
    index = load_index(new)
    assert (index.model, [e.file for e in index.engines]) == ("mine", ["cpu.engine", "sm_90.engine"])
    (weights,) = index.weights
    assert (new / weights.file).stat().st_size == weights.size_bytes
    assert invoke("inspect", new, "--verify").exit_code == 0
    full = invoke(*args, "-o", new)
    assert full.exit_code == 2
    assert "is not empty" in full.stderr


def test_without_its_gpu_an_engine_says_that_it_was_not_verified(
    built: Path, options: Callable[..., Any], tmp_path: Path
) -> None:
    engine = tmp_path / "gpu.engine"
    gpu = options(target="cuda:sm_90", dtype="bfloat16", tokens_per_page=16, verify=False)
    build(str(built / "base"), engine, gpu)
    done = refit(engine, str(built / "tuned"), tmp_path / "out.engine")
    assert not done.ran.verified
    assert done.ran.text.startswith(f"not verified here: {tmp_path / 'out.engine'} was built for cuda:sm_90")
    with open_engine(done.files[0]) as opened:
        assert opened.manifest.parity == {"verdict": "refit", "outputs": "not verified"}
        assert str(tmp_path) not in json.dumps(opened.manifest.to_json())


@pytest.mark.usefixtures("unrun")
def test_a_gguf_file(
    models: ModuleType, gguf_writer: ModuleType, options: Callable[..., Any], tmp_path: Path
) -> None:
    paths = [
        gguf_writer.write_gguf(
            models.make_tiny("llama", tmp_path / f"hf{seed}", seed=seed),
            tmp_path / f"{seed}.gguf",
            arch="llama",
        )
        for seed in (0, 1)
    ]
    build(str(paths[0]), tmp_path / "m.engine", options(verify=False, quantize="int8-dynamic"))
    done = refit(tmp_path / "m.engine", str(paths[1]), tmp_path / "out.engine")
    assert done.checkpoint != done.built_from
    assert weights_of(tmp_path / "out.engine") != weights_of(tmp_path / "m.engine")
    back = refit(tmp_path / "out.engine", str(paths[0]), tmp_path / "back.engine")
    assert back.checkpoint == done.built_from
    assert weights_of(tmp_path / "back.engine") == weights_of(tmp_path / "m.engine")
    longer = gguf_writer.write_gguf(
        tmp_path / "hf1", tmp_path / "longer.gguf", arch="llama", metadata={"llama.rope.freq_base": 5e5}
    )
    with pytest.raises(EngineIncompatibleError, match=r"llama\.rope\.freq_base is 500000.0"):
        refit(tmp_path / "m.engine", str(longer), tmp_path / "no.engine")


LEAN = """
import sys
for name in ("torch", "transformers", "triton", "onnx", "rich", "gguf"):
    sys.modules[name] = None
from tapeout.cli.main import cli
cli(sys.argv[1:])
"""


def test_no_framework_is_needed(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.engine"
    args = ["refit", built / "base.engine", "--weights", built / "tuned", "-o", out]
    done = subprocess.run(
        [sys.executable, "-c", LEAN, *map(str, args)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert weights_of(out) == weights_of(built / "tuned.engine")
