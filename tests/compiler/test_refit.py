"""`tapeout refit`: another checkpoint's weights in an engine, as a build would have made them, or none."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from tapeout.cli.main import cli
from tapeout.compiler.build import build
from tapeout.compiler.refit import refit
from tapeout.compiler.refit_check import Ran, weight_problems
from tapeout.model_defs.weights import RECIPE_VERSION
from tapeout.plugins.errors import EngineIncompatibleError, UsageError
from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine import open_engine
from tapeout.runtime.engine_set import load_index

SINGLE = "model.safetensors"
Tensors = dict[str, np.ndarray]


def invoke(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args])


def edit(model: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(model / SINGLE)
    change(tensors)
    save_file(tensors, model / SINGLE)


def set_json(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def weights_of(path: Path) -> dict[str, bytes]:
    with open_engine(path) as engine:
        return {name: bytes(engine.weight(name).data) for name in engine.weights}


def greedy(engine: Path) -> list[int]:
    with LLM(engine) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return list(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def built(models: ModuleType, options: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, `tuned` (checkpoints of one config), and engines of both, embedded."""
    folder = tmp_path_factory.mktemp("refit")
    for name, seed in (("base", 0), ("tuned", 1)):
        model = models.make_tiny("llama", folder / name, seed=seed)
        build(str(model), folder / f"{name}.engine", options(verify=False))
    return folder


@pytest.fixture
def tuned(built: Path, tmp_path: Path) -> Path:
    """A copy of the fine-tune, to be spoiled."""
    return Path(shutil.copytree(built / "tuned", tmp_path / "tuned"))


@pytest.fixture
def unrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs a step: where that is not what a test is about."""

    class NoStep(contextlib.nullcontext[Any]):
        def __init__(self, target: str) -> None:
            super().__init__(self)

        def run(self, path: Path, name: Path) -> Ran:
            return Ran(False, "not asked")

    monkeypatch.setattr("tapeout.compiler.refit.FirstStep", NoStep)


# ---- what comes out -----------------------------------------------------------------------------


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


# ---- what is refused ----------------------------------------------------------------------------


def refused(result: Result, code: int, folder: Path, *words: str) -> None:
    """Told, and nothing left behind."""
    assert result.exit_code == code, (result.stdout, result.stderr)
    for word in words:
        assert word in result.stderr
    assert "hint: " in result.stderr
    assert {path.name for path in folder.iterdir()} <= {"tuned"}


def test_another_config_is_told_key_by_key(built: Path, tuned: Path, tmp_path: Path) -> None:
    set_json(
        tuned / "config.json", rms_norm_eps=1e-3, num_attention_heads=8, new_switch=True, use_cache=False
    )
    result = invoke("refit", built / "base.engine", "--weights", tuned, "-o", tmp_path / "o.engine")
    refused(
        result, 3, tmp_path,
        "is another model than",
        "num_attention_heads is 8, the engine was built with 4",
        "rms_norm_eps is 0.001, the engine was built with 1e-06",
        "new_switch is True, the engine was built without it",
    )  # fmt: skip
    assert "use_cache" not in result.stderr


def test_all_tensors_that_do_not_fit_are_listed(built: Path, tuned: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].copy()
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)
        tensors["model.layers.0.lora.weight"] = np.ones((2, 2), np.float32)

    edit(tuned, change)
    result = invoke("refit", built / "base.engine", "--weights", tuned, "-o", tmp_path / "o.engine")
    refused(
        result, 2, tmp_path, "4 do not fit",
        "missing: model.layers.1.mlp.up_proj.weight float32[96, 64]",
        "differs: model.norm.weight is float32[32], expected float32[64]",
        "differs: lm_head.weight is float16[300, 64], expected float32[300, 64]",
        "extra: model.layers.0.lora.weight float32[2, 2]",
    )  # fmt: skip


@pytest.mark.usefixtures("unrun")
def test_another_text_is_refused_unless_the_engines_is_kept(built: Path, tuned: Path, tmp_path: Path) -> None:
    (tuned / "chat_template.jinja").write_text("{{ messages }}")
    set_json(tuned / "generation_config.json", eos_token_id=[2, 7], temperature=0.3)
    args = ("refit", built / "base.engine", "--weights", tuned, "-o", tmp_path / "o.engine")
    refused(
        invoke(*args), 2, tmp_path,
        "speaks another text than",
        "chat template is another one",
        "eos_token_id is [2, 7], the engine has [1, 4]",
        "generation temperature is 0.3",
        "--keep-text",
    )  # fmt: skip
    result = invoke(*args, "--keep-text")
    assert result.exit_code == 0, result.stderr
    assert "warning: the engine's text was kept: chat template is another one" in result.stderr
    with open_engine(tmp_path / "o.engine") as new, open_engine(built / "base.engine") as old:
        assert new.text("chat_template.jinja") == old.text("chat_template.jinja")
        assert new.manifest.tokenizer == old.manifest.tokenizer


@pytest.mark.parametrize("storage", ["embedded", "shared"])
def test_weights_that_are_not_sound_are_told_and_not_kept(
    storage: str, built: Path, tuned: Path, options: Callable[..., Any], tmp_path: Path
) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"][3, :5] = np.nan
        tensors["model.norm.weight"][0] = np.inf
        tensors["lm_head.weight"][:] = 0

    edit(tuned, spoil)
    engine = built / "base.engine"
    if storage == "shared":
        engine = built / "shared" / "base.engine"
        engine.parent.mkdir()
        build(str(built / "base"), engine, options(verify=False, weights="shared"))
    result = invoke("refit", engine, "--weights", tuned, "-o", tmp_path / "o.engine")
    refused(
        result, 1, tmp_path, "are not sound", "has 5 values that are NaN or infinite",
        "float32[64] has 1 values that are NaN or infinite", "float32[300, 64] is all zero",
    )  # fmt: skip


def test_outputs_that_are_not_sound_are_told(built: Path, tuned: Path, tmp_path: Path) -> None:
    """Every weight is finite, but what the engine makes of them is not."""

    def grow(tensors: Tensors) -> None:
        for name in ("model.norm.weight", "lm_head.weight"):
            tensors[name] *= np.float32(1e30)

    edit(tuned, grow)
    result = invoke("refit", built / "base.engine", "--weights", tuned, "-o", tmp_path / "o.engine")
    refused(result, 1, tmp_path, "the engine's logits are not finite")


def test_paths_that_cannot_be(built: Path, tuned: Path, tmp_path: Path) -> None:
    engine = built / "base.engine"
    before = engine.read_bytes()
    refused(invoke("refit", engine, "--weights", tuned, "-o", engine), 2, tmp_path, "is an input")
    with pytest.raises(UsageError, match="is the engine that is read"):
        refit(engine, str(tuned), engine)
    refused(
        invoke("refit", engine, "--weights", tmp_path / "no", "-o", tmp_path / "o"), 2, tmp_path, "no such"
    )
    (tuned / "config.json").unlink()
    refused(invoke("refit", engine, "--weights", tuned, "-o", tmp_path / "o"), 2, tmp_path, "no config.json")
    assert engine.read_bytes() == before


def _shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _garble(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_shorten, "model.safetensors"),
        (_garble, "model.safetensors"),
        (lambda file: file.write_bytes(b""), "model.safetensors"),
        (lambda file: file.unlink(), "tuned"),
        (lambda file: file.with_name("config.json").write_text("{"), "config.json"),
        (lambda file: file.with_name("tokenizer.json").write_text("{"), "tokenizer.json"),
    ],
    ids=["short", "garbled", "empty", "no-weights", "config", "tokenizer"],
)
def test_a_checkpoint_that_is_damaged(
    built: Path, tuned: Path, tmp_path: Path, spoil: Callable[[Path], Any], words: str
) -> None:
    spoil(tuned / SINGLE)
    result = invoke("refit", built / "base.engine", "--weights", tuned, "-o", tmp_path / "o.engine")
    refused(result, 2, tmp_path, words)
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_checkpoint_of_another_architecture(built: Path, models: ModuleType, tmp_path: Path) -> None:
    other = models.make_tiny("qwen3", tmp_path / "tuned", seed=0)
    result = invoke("refit", built / "base.engine", "--weights", other, "-o", tmp_path / "o.engine")
    refused(result, 3, tmp_path, "is another model than")
    assert "qwen3" in result.stderr
    assert "tapeout build" in result.stderr


def test_engines_that_cannot_be(built: Path, tuned: Path, tmp_path: Path) -> None:
    (tuned / "empty").mkdir()
    for engine, words in (
        ("missing.engine", "missing.engine"),
        ("tuned/empty", "it has no index.json and no .engine file"),
        ("tuned/model.safetensors", "model.safetensors"),
    ):
        for output in ([], ["-o", tmp_path / "o.engine"]):
            result = invoke("refit", tmp_path / engine, "--weights", tuned, *output)
            code = 3 if engine.endswith("safetensors") else 2
            refused(result, code, tmp_path, words)
            assert "hint: " in result.stderr


def test_recipes_of_another_version_are_refused(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tapeout.model_defs.weights.RECIPE_VERSION", RECIPE_VERSION + 1)
    result = invoke("refit", built / "base.engine", "--weights", built / "tuned", "-o", tmp_path / "o.engine")
    refused(result, 3, tmp_path, "not those that made its weights")


def test_every_kind_of_weight_is_looked_at() -> None:
    import ml_dtypes

    from tapeout.runtime.engine import WeightData

    def problems(values: np.ndarray) -> list[str]:
        data = memoryview(np.ascontiguousarray(values).view(np.uint8).reshape(-1))
        weight = WeightData("w", values.dtype.name, values.shape, data)
        engine: Any = type("E", (), {"weights": ("w",), "weight": staticmethod(lambda name: weight)})
        return weight_problems(engine)

    for kind in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.float64):
        good = np.full((4, 8), -1.5).astype(kind)
        assert problems(good) == []
        for bad in (np.nan, np.inf, -np.inf):
            spoiled = good.copy()
            spoiled[1, 2] = bad
            (line,) = problems(spoiled)
            assert "has 1 values that are NaN or infinite" in line
        assert problems(np.full((4, 8), -0.0).astype(kind)) == [f"w {np.dtype(kind).name}[4, 8] is all zero"]
        assert problems(np.zeros(8).astype(kind)) == []
    assert problems(np.zeros((2, 2), np.int8)) == ["w int8[2, 2] is all zero"]
    assert problems(np.eye(2, dtype=np.int8) * -128) == []
    large = np.ones((3, 1 << 20), np.float32)
    large[2, -1] = np.nan  # beyond the first piece that is looked at
    assert len(problems(large)) == 1
