"""Weight files made where the engine is used: the same bytes as the build's, or none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from tapeout.cli.main import cli
from tapeout.compiler.build import build
from tapeout.compiler.dummy_weights import write_dummy_weights
from tapeout.compiler.recipe_book import RECIPES_TEXT, recipe_book
from tapeout.compiler.weight_file import write_weights
from tapeout.model_defs.weights import RECIPE_VERSION
from tapeout.plugins.errors import EngineError, EngineIncompatibleError, UsageError
from tapeout.runtime.engine import open_engine

pytestmark = pytest.mark.usefixtures("shared_traces")

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
SINGLE = "model.safetensors"
Edit = Callable[[dict[str, np.ndarray]], None]


def moved(engine: Path, to: Path) -> Path:
    """The engine alone, as it arrives on another machine."""
    to.mkdir()
    return Path(shutil.copy(engine, to))


def weight_file(folder: Path) -> Path:
    (path,) = folder.glob("*.weights.safetensors")
    return path


@pytest.fixture
def round_trip(tmp_path: Path, options: Callable[..., Any]) -> Callable[..., str]:
    """Builds a model, makes its weight file anew beside a copy of the engine, compares; gives the recipes."""

    def check(model: Path, **changes: Any) -> str:
        (tmp_path / "built").mkdir()
        engine = tmp_path / "built" / "m.engine"
        build(str(model), engine, options(weights="shared", verify=False, **changes))
        copy = moved(engine, tmp_path / "moved")
        result = write_weights(copy, str(model))
        assert not result.reused
        assert result.path == copy.with_name(weight_file(engine.parent).name)
        assert result.path.read_bytes() == weight_file(engine.parent).read_bytes()
        with open_engine(copy) as opened:
            opened.verify_all()
            return opened.text(RECIPES_TEXT).decode()

    return check


# ---- the same bytes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "config", "changes", "steps"),
    [
        ("llama", {}, {}, ("concat",)),
        ("llama", {}, {"dtype": "bfloat16"}, ("concat", "cast")),
        ("llama", {"dtype": "bfloat16"}, {"dtype": "bfloat16"}, ("concat",)),
        ("llama", {"dtype": "bfloat16"}, {"dtype": "float32"}, ("concat", "cast")),
        ("qwen2", {"tie_word_embeddings": True}, {}, ("concat",)),
        ("gemma3_text", {}, {"dtype": "bfloat16"}, ("cast",)),
        ("llama", {}, {"quantize": "int8-dynamic"}, ("quantize_rows",)),
        ("llama", {}, {"target": "cuda:sm_90", "dtype": "bfloat16", "tokens_per_page": 16}, ("cast",)),
    ],
)
def test_a_hugging_face_directory(
    round_trip: Callable[..., str], models: ModuleType, tmp_path: Path,
    model_type: str, config: dict[str, Any], changes: dict[str, Any], steps: tuple[str, ...],
) -> None:  # fmt: skip
    recipes = round_trip(models.make_tiny(model_type, tmp_path / "model", **config), **changes)
    assert all(f'"name":"{step}"' in recipes for step in steps)
    assert str(tmp_path) not in recipes


def test_a_checkpoint_in_shards_gives_the_file_of_one_piece(
    round_trip: Callable[..., str], models: ModuleType, tmp_path: Path
) -> None:
    model = models.make_tiny("llama", tmp_path / "model")
    round_trip(model)
    tensors = load_file(model / SINGLE)
    (model / SINGLE).unlink()
    save_file({n: t for n, t in tensors.items() if ".0." in n}, model / "a.safetensors")
    save_file({n: t for n, t in tensors.items() if ".0." not in n}, model / "b.safetensors")
    index = {n: "a.safetensors" if ".0." in n else "b.safetensors" for n in tensors}
    (model / f"{SINGLE}.index.json").write_text(json.dumps({"weight_map": index}))
    engine = moved(tmp_path / "built" / "m.engine", tmp_path / "sharded")
    path = write_weights(engine, str(model)).path
    assert path.read_bytes() == weight_file(tmp_path / "built").read_bytes()


def test_names_without_prefix_a_copied_head_and_unused_tensors(
    round_trip: Callable[..., str], models: ModuleType, tmp_path: Path
) -> None:
    """What transformers' classes say at the build holds without them later."""
    model = models.make_tiny("llama", tmp_path / "model", tie_word_embeddings=True)
    edit(model, _as_saved_long_ago)
    recipes = json.loads(round_trip(model))
    assert recipes["hf"] == {"prefix": "model", "tied": {"lm_head.weight": "model.embed_tokens.weight"}}
    assert recipes["unused"] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


def _as_saved_long_ago(tensors: dict[str, np.ndarray]) -> None:
    old = dict(tensors)
    tensors.clear()
    tensors |= {name.removeprefix("model."): value for name, value in old.items()}
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("model_type", "arch", "quantize"),
    [("llama", "llama", Q4_1), ("gemma2", "gemma2", Q8_0), ("llama", "llama", None)],
)
def test_a_gguf_file(
    round_trip: Callable[..., str], models: ModuleType, gguf_writer: ModuleType, tmp_path: Path,
    model_type: str, arch: str, quantize: Any,
) -> None:  # fmt: skip
    folder = models.make_tiny(model_type, tmp_path / "hf", tie_word_embeddings=True)
    metadata = {"gemma2.attention.sliding_window": 16} if arch == "gemma2" else {}
    path = tmp_path / "model.gguf"
    gguf_writer.write_gguf(folder, path, arch=arch, quantize=quantize, metadata=metadata)
    recipes = json.loads(round_trip(path))
    stored = recipes["tensors"]["model.layers.0.self_attn.q_proj.weight"]
    assert stored["name"] == "blk.0.attn_q.weight"
    assert stored["dtype"] == ("F32" if quantize is None else quantize.name)


@pytest.mark.parametrize(
    ("model_type", "arch", "sizes", "parts"),
    [
        (
            "gpt_oss",
            "gpt-oss",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
             "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            {"blk.0.ffn_gate_exps.weight": "Q8_0", "blk.1.attn_sinks.weight": "F32"},
        ),
        ("gpt2", "gpt2", {}, {"blk.0.attn_qkv.weight": "Q8_0"}),
    ],
)  # fmt: skip
def test_parameters_made_from_other_tensors_of_a_gguf_file(
    round_trip: Callable[..., str], models: ModuleType, gguf_writer: ModuleType, tmp_path: Path,
    model_type: str, arch: str, sizes: dict[str, Any], parts: dict[str, str],
) -> None:  # fmt: skip
    folder = models.make_tiny(model_type, tmp_path / "hf", **sizes)
    path = tmp_path / "model.gguf"
    metadata = {"gpt-oss.attention.sliding_window": 16} if arch == "gpt-oss" else {}
    gguf_writer.write_gguf(folder, path, arch=arch, quantize=Q8_0, metadata=metadata)
    recipes = json.loads(round_trip(path))
    assert {name: recipes["tensors"][name]["dtype"] for name in parts} == parts


def test_a_hub_id_in_the_cache(
    round_trip: Callable[..., str], models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.make_tiny("llama", tmp_path / "model")
    round_trip(model)
    repo, commit = tmp_path / "hub" / "models--org--tiny", "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    model.rename(repo / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    engine = moved(tmp_path / "built" / "m.engine", tmp_path / "elsewhere")
    assert write_weights(engine, "org/tiny").path.read_bytes()
    with pytest.raises(UsageError, match="'v9'"):
        write_weights(engine, "org/tiny", revision="v9")


def test_what_stands_there_is_kept_replaced_or_left(
    shared_engine: Path, tmp_path: Path, models: ModuleType
) -> None:
    engine = shutil.copytree(shared_engine.parent, tmp_path / "set") / shared_engine.name
    model, path = engine.with_name("model"), weight_file(engine.parent)
    good, stamp = path.read_bytes(), path.stat().st_mtime_ns
    assert write_weights(engine, str(model)).reused
    assert path.stat().st_mtime_ns == stamp
    for bad in (good[:-1], good[:5000] + b"?" + good[5001:]):
        path.write_bytes(bad)
        assert not write_weights(engine, str(model)).reused
        assert path.read_bytes() == good
    path.unlink()
    write_dummy_weights(engine, 1)
    dummy = path.read_bytes()
    edit(model, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"] + 1}))
    with pytest.raises(UsageError):
        write_weights(engine, str(model))
    assert path.read_bytes() == dummy  # what was there stays when nothing better came
    assert write_weights(engine, str(models.make_tiny("llama", model))).path.read_bytes() == good


# ---- what does not fit ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_engine(
    models: ModuleType, options: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    model = models.make_tiny("llama", folder / "model")
    build(str(model), folder / "m.engine", options(weights="shared", verify=False))
    return folder / "m.engine"


def edit(model: Path, change: Edit) -> None:
    tensors = load_file(model / SINGLE)
    change(tensors)
    save_file(tensors, model / SINGLE)


def refused(engine: Path, model: Path, tmp_path: Path, *parts: str) -> None:
    """With every part in the message, nothing written, exit code 2."""
    copy = moved(engine, tmp_path / "alone")
    result = CliRunner().invoke(cli, ["weights", str(copy), str(model)])
    assert result.exit_code == 2, result.output
    assert all(part in result.output for part in (*parts, "hint: ")), result.output
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_all_tensors_that_do_not_fit_are_listed(
    shared_engine: Path, models: ModuleType, tmp_path: Path
) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].copy()
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)

    model = models.make_tiny("llama", tmp_path / "model")
    edit(model, change)
    refused(
        shared_engine, model, tmp_path, "4 tensors do not fit",
        "missing: model.layers.1.mlp.up_proj.weight float32[96, 64]",
        "differs: model.norm.weight is float32[32], expected float32[64]",
        "differs: lm_head.weight is float16[300, 64], expected float32[300, 64]",
        "extra: model.layers.2.mlp.up_proj.weight float32[2, 2]",
    )  # fmt: skip


def test_another_model_of_the_same_shape(shared_engine: Path, models: ModuleType, tmp_path: Path) -> None:
    """A fine-tune: only the bytes tell, and they tell which tensors."""
    model = models.make_tiny("llama", tmp_path / "model")
    name = "model.layers.0.self_attn.v_proj.weight"
    edit(model, lambda tensors: tensors.update({name: tensors[name] * 2}))
    refused(shared_engine, model, tmp_path, "1 tensors have other values", f"differs: {name}")


def test_another_family_another_kind_of_file_and_no_model(
    shared_engine: Path, models: ModuleType, gguf_writer: ModuleType, tmp_path: Path
) -> None:
    qwen = models.make_tiny("qwen2", tmp_path / "qwen")
    refused(shared_engine, qwen, tmp_path, "extra: model.layers.0.self_attn.q_proj.bias")
    path = gguf_writer.write_gguf(
        models.make_tiny("llama", tmp_path / "hf"), tmp_path / "m.gguf", arch="llama"
    )
    shutil.rmtree(tmp_path / "alone")
    refused(shared_engine, path, tmp_path, "was built from the safetensors of a Hugging Face model", "GGUF")
    shutil.rmtree(tmp_path / "alone")
    refused(shared_engine, tmp_path / "nowhere", tmp_path, "no such file or directory")
    shutil.rmtree(tmp_path / "alone")
    (qwen / SINGLE).write_bytes((qwen / SINGLE).read_bytes()[:-5])
    refused(shared_engine, qwen, tmp_path, "truncated")


def test_another_quantization_of_the_same_gguf(
    models: ModuleType, gguf_writer: ModuleType, options: Callable[..., Any], tmp_path: Path
) -> None:
    folder = models.make_tiny("llama", tmp_path / "hf")
    for name, kind in (("a.gguf", Q4_1), ("b.gguf", Q8_0)):
        extra = {} if name == "a.gguf" else {"blk.0.odd.weight": np.zeros(32, np.float32)}
        gguf_writer.write_gguf(folder, tmp_path / name, arch="llama", quantize=kind, extra=extra)
    build(str(tmp_path / "a.gguf"), tmp_path / "m.engine", options(weights="shared", verify=False))
    refused(
        tmp_path / "m.engine", tmp_path / "b.gguf", tmp_path,
        "differs: blk.1.ffn_up.weight is Q8_0[96, 64], expected Q4_1[96, 64]",
        "extra: blk.0.odd.weight F32[32]",
    )  # fmt: skip
    shutil.rmtree(tmp_path / "alone")
    refused(tmp_path / "m.engine", folder, tmp_path, "was built from a GGUF file (llama)", "is a directory")


def test_engines_without_a_weight_file_or_recipes(
    shared_engine: Path, models: ModuleType, options: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = shared_engine.parent / "model"
    build(str(model), tmp_path / "m.engine", options(verify=False))
    with pytest.raises(UsageError, match="embeds its weights"):
        write_weights(tmp_path / "m.engine", str(model))
    with open_engine(tmp_path / "m.engine") as engine:
        assert recipe_book(engine).refs().keys() == engine.weights.keys()
        older: Any = SimpleNamespace(path=engine.path, text_names=())
        with pytest.raises(EngineError, match="holds no recipes"):
            recipe_book(older)
    # Recipes of another version give other bytes under the same name: refused before anything is written.
    monkeypatch.setattr("tapeout.model_defs.weights.RECIPE_VERSION", RECIPE_VERSION + 1)
    with pytest.raises(EngineIncompatibleError, match="not those that made its weights"):
        write_weights(moved(shared_engine, tmp_path / "alone"), str(model))


@pytest.mark.parametrize("arguments", [[], ["MODEL", "--dummy", "1"], ["--dummy", "1", "--revision", "main"]])
def test_one_source_of_weights(shared_engine: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, ["weights", str(shared_engine), *arguments])
    assert result.exit_code == 2


# ---- the lean process -----------------------------------------------------------------------

LEAN = """
import sys
for name in {absent!r}:
    sys.modules[name] = None
from tapeout.cli.main import cli
try:
    cli(sys.argv[1:])
finally:
    print(sorted({heavy!r} & {{name for name, module in sys.modules.items() if module is not None}}))
"""
HEAVY = {"torch", "transformers", "triton", "onnx", "gguf", "rich"}


def lean(*arguments: object, absent: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    code = LEAN.format(absent=absent, heavy=HEAVY)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_process_holds_no_framework(
    shared_engine: Path, gguf_writer: ModuleType, models: ModuleType, options: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    absent = ("torch", "transformers", "triton", "onnx", "rich")
    copy = moved(shared_engine, tmp_path / "alone")
    done = lean("weights", copy, shared_engine.parent / "model", absent=(*absent, "gguf"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert weight_file(copy.parent).read_bytes() == weight_file(shared_engine.parent).read_bytes()

    path = gguf_writer.write_gguf(
        models.make_tiny("llama", tmp_path / "hf"), tmp_path / "m.gguf", arch="llama"
    )
    build(str(path), tmp_path / "m.engine", options(weights="shared", verify=False))
    copy = moved(tmp_path / "m.engine", tmp_path / "alone2")
    done = lean("weights", copy, path, absent=(*absent, "gguf"))
    assert done.returncode == 2
    assert "pip install 'tapeout[weights,gguf]'" in done.stderr
    done = lean("weights", copy, path, absent=absent)
    assert done.stdout.splitlines()[-1] == "['gguf']"
    assert weight_file(copy.parent).read_bytes() == weight_file(tmp_path).read_bytes()
    done = lean("weights", copy, path, absent=("ml_dtypes",))
    assert done.returncode == 2
    assert "pip install 'tapeout[weights]'" in done.stderr
