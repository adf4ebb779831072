"""What `tapeout refit` refuses: told, all at once, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from refit_command import invoke
from safetensors.numpy import load_file, save_file

from tapeout.compiler.build import build
from tapeout.compiler.refit import refit
from tapeout.compiler.refit_check import weight_problems
from tapeout.model_defs.weights import RECIPE_VERSION
from tapeout.plugins.errors import UsageError
from tapeout.runtime.engine import open_engine

SINGLE = "model.safetensors"
Tensors = dict[str, np.ndarray]


def edit(model: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(model / SINGLE)
    change(tensors)
    save_file(tensors, model / SINGLE)


def set_json(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


@pytest.fixture
def tuned(built: Path, tmp_path: Path) -> Path:
    """A copy of the fine-tune, to be spoiled."""
    return Path(shutil.copytree(built / "tuned", tmp_path / "tuned"))


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
