"""Whatever is wrong with the input: one clear message, the right exit code, nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import load_file, save_file

from tapeout.compiler.engine_writer import write_engine
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.native.host import detect_host
from tapeout.runtime.engine import open_engine

Invoke = Callable[..., Result]
Edit = Callable[..., None]


def refused(result: Any, code: int, *parts: str) -> None:
    """One error with a hint, on stderr only, naming every one of `parts`."""
    exit_code = result.exit_code if isinstance(result, Result) else result.returncode
    assert exit_code == code, result.stderr
    assert result.stderr.count("error: ") == 1, result.stderr
    error = result.stderr[result.stderr.index("error: ") :]
    for part in (*parts, "\nhint: "):
        assert part in error, f"{part!r} is not in:\n{error}"
    assert error.count("hint: ") == 1
    assert "Traceback" not in result.stderr
    assert "unexpected" not in error
    assert result.stdout == ""


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def build(invoke: Invoke, tmp_path: Path) -> Callable[..., Result]:
    """Builds into a folder of its own that must stay empty."""
    target = tmp_path / "out"
    target.mkdir()

    def build(model: str | Path, *args: str | Path) -> Result:
        result = invoke("build", model, "-o", target / "m.engine", *args)
        assert list(target.iterdir()) == []
        return result

    return build


# ---- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["missing-folder", "missing.gguf", "a/b/c"])
def test_missing_model(build: Callable[..., Result], tmp_path: Path, name: str) -> None:
    refused(build(tmp_path / name), 2, str(tmp_path / name), "no such file or directory")


def test_folder_without_config(build: Callable[..., Result], checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    refused(build(checkpoint), 2, str(checkpoint), "no config.json", "model.safetensors")


def test_config_that_is_not_json(build: Callable[..., Result], checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": "llama",')
    refused(build(checkpoint), 2, str(checkpoint / "config.json"), "not valid JSON")


def test_unknown_architecture(build: Callable[..., Result], checkpoint: Path, edit_json: Edit) -> None:
    edit_json(checkpoint / "config.json", model_type="frobnicator", architectures=["FrobForCausalLM"])
    refused(build(checkpoint), 5, "'frobnicator'", "FrobForCausalLM", "no config class and no model code")


def test_an_encoder_is_not_supported(build: Callable[..., Result], checkpoint: Path) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (checkpoint / "config.json").write_text(json.dumps(config))
    refused(build(checkpoint), 5, "t5")


def test_every_tensor_that_does_not_fit_is_named(build: Callable[..., Result], checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.7.surprise"] = np.zeros(3, np.float32)
    tensors["model.layers.1.self_attn.q_proj.weight"] = np.zeros((64, 63), np.float32)
    save_file(tensors, checkpoint / "model.safetensors")
    refused(
        build(checkpoint),
        2,
        "missing: model.layers.0.mlp.up_proj.weight [96, 64]",
        "missing: model.norm.weight [64]",
        "extra: model.layers.7.surprise [3]",
        "wrong shape: model.layers.1.self_attn.q_proj.weight is [64, 63], expected [64, 64]",
    )


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_safetensors(build: Callable[..., Result], checkpoint: Path, kept: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(build(checkpoint), 2, "model.safetensors", "truncated")


@pytest.mark.parametrize("kept", [3, 20, 5_000, 2_000_000, 40_000_000])
def test_truncated_gguf(build: Callable[..., Result], smollm2_gguf: Path, tmp_path: Path, kept: int) -> None:
    """Cut within the magic number, the counts, the metadata, the tokenizer or a tensor."""
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as file:
        path.write_bytes(file.read(kept))
    refused(build(path), 2, "cut.gguf", "truncated")


def test_a_file_that_is_no_gguf(build: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK" * 100)
    refused(build(tmp_path / "model.bin"), 2, "model.bin", "not a GGUF file")


def test_weights_that_are_not_finite(
    build: Callable[..., Result], checkpoint: Path, tiny_cache: Path, tiny_engine: Path
) -> None:
    """Only running the engine shows it, so the finished file is thrown away."""
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, checkpoint / "model.safetensors")
    refused(build(checkpoint, "--timing-cache", tiny_cache), 1, "not finite")


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path("MARKER").touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_code_of_a_model_runs_only_when_allowed(
    tapeout: Callable[..., subprocess.CompletedProcess[str]],
    invoke: Invoke,
    checkpoint: Path,
    edit_json: Edit,
    tmp_path: Path,
    allowed: bool,
) -> None:
    marker = tmp_path / "ran"
    (checkpoint / "own.py").write_text(CODE.replace("MARKER", str(marker)))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_json(
        checkpoint / "config.json", model_type="own", architectures=["OwnForCausalLM"], auto_map=auto_map
    )
    build = ["build", checkpoint, "-o", tmp_path / "m.engine", "--dry-run"]
    if allowed:  # in a process of its own, because the code becomes part of the one that runs it
        result = tapeout(*build, "--trust-remote-code", env={**os.environ, "HF_HOME": str(tmp_path / "hf")})
        assert result.returncode == 0, result.stderr
    else:
        refused(invoke(*build), 2, "'own'", "own Python code", "--trust-remote-code")
    assert marker.exists() == allowed
    assert not (tmp_path / "m.engine").exists()


def test_hub_id_without_network(build: Callable[..., Result]) -> None:
    """HF_HUB_OFFLINE=1 is set for all tests."""
    refused(build("nobody/never-made"), 2, "'nobody/never-made'", "local cache", "HF_HUB_OFFLINE")


# ---- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "parts"),
    [
        (["--target", "cuda:sm_35"], 5, ["'cuda:sm_35'", "sm_90", "h100"]),
        (["--target", "cuda"], 2, ["'cuda'", "cuda:sm_NN or cuda:SKU"]),
        (["--target", "cuda:sm_90", "--quantize", "int8-dynamic"], 5, ["'int8-dynamic'", "cuda:sm_90"]),
        (["--target", "cuda:sm_90", "--dtype", "fp16"], 5, ["'float16'", "cuda:sm_90"]),
        (["--target", "tpu"], 2, ["'tpu'", "expected auto, cpu, cuda:sm_NN"]),
        (["--dtype", "fp16"], 5, ["'float16'", "target cpu", "float32, bfloat16"]),
        (["--max-seq-len", "100000"], 2, ["100000", "512 positions"]),
        (["--max-seq-len", "0", "--tokens-per-page", "3"], 2, ["max_seq_len: '0'", "tokens_per_page: '3'"]),
        (["--max-num-tokens", "4", "--max-batch-size", "8"], 2, ["max_num_tokens: 4", "max_batch_size 8"]),
        (["--timing-cache", "/nowhere/cache.json"], 2, ["/nowhere/cache.json", "/nowhere is none"]),
    ],
)
def test_invalid_options(
    build: Callable[..., Result], checkpoint: Path, args: list[str], code: int, parts: list[str]
) -> None:
    refused(build(checkpoint, *args), code, *parts)


def test_unknown_key_of_a_config_file(build: Callable[..., Result], checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max-seq-len: 64\nmax-batch-sice: 4\n")
    refused(
        build(checkpoint, "--config", path), 2, f"{path}:2: max-batch-sice", "did you mean max-batch-size?"
    )


@pytest.mark.parametrize("text", ["not json", '{"version": 999}'])
def test_a_timing_cache_that_is_none(
    build: Callable[..., Result], checkpoint: Path, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "cache.json"
    path.write_text(text)
    refused(build(checkpoint, "--timing-cache", path), 2, str(path))
    assert path.read_text() == text


# ---- outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["build", "run"])
def test_outputs_that_cannot_be_written(
    invoke: Invoke, tiny_checkpoint: Path, tiny_engine: Path, tmp_path: Path, verb: str
) -> None:
    """A directory, a folder that is missing, and a file system that takes no files (even from root)."""
    args = [tiny_checkpoint] if verb == "build" else [tiny_engine, "--prompt", "the"]
    for output, part in (
        (tmp_path, "is a directory"),
        (tmp_path / "missing" / "x", "does not exist"),
        (Path("/proc/x"), "cannot be written"),
    ):
        refused(invoke(verb, *args, "-o", output), 2, str(output), part)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(
    invoke: Invoke, tiny_checkpoint: Path, tiny_engine: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    """A limit on file sizes ends the last write as a full disk does."""
    output = tmp_path / "m.engine"
    limits = ("--max-batch-size", "4", "--max-num-tokens", "64", "--tokens-per-page", "16")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (tiny_engine.stat().st_size - 1000, hard))
    try:
        result = invoke("build", tiny_checkpoint, "-o", output, "--timing-cache", tiny_cache, *limits)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    refused(result, 1, "no space left", str(output), "bytes")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
from tapeout.cli.main import main
import tapeout.compiler.weight_stream as stream
run_recipe, count = stream.run_recipe, 0
def slow(ref, read):
    global count
    count += 1
    if count == 4:
        print("writing", flush=True)
        time.sleep(600)
    return run_recipe(ref, read)
stream.run_recipe = slow
main()
"""


def test_a_build_that_is_killed(
    invoke: Invoke, tiny_checkpoint: Path, tiny_engine: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    """SIGKILL between two weights: no engine appears, and the next build clears what is left."""
    output = tmp_path / "m.engine"
    limits = ("--max-batch-size", "4", "--max-num-tokens", "64", "--tokens-per-page", "16")
    build = ["build", tiny_checkpoint, "-o", output, "--timing-cache", tiny_cache, *limits]
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, *map(str, build)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".m.engine.")
    child.kill()
    child.communicate()
    assert list(tmp_path.iterdir()) == [leftover]
    assert invoke(*build).exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.engine", "m.engine.report.json"]
    assert output.read_bytes() == tiny_engine.read_bytes()


def test_an_old_engine_survives_a_failed_build(
    invoke: Invoke, checkpoint: Path, tiny_engine: Path, tmp_path: Path
) -> None:
    output = Path(shutil.copy(tiny_engine, tmp_path / "m.engine"))
    (checkpoint / "config.json").unlink()
    assert invoke("build", checkpoint, "-o", output).exit_code == 2
    assert output.read_bytes() == tiny_engine.read_bytes()


# ---- engines ----------------------------------------------------------------------------------


def offsets(engine: Path) -> dict[str, int]:
    """A byte of each part of an engine file."""
    data = engine.read_bytes()
    with open_engine(engine) as opened:
        weight = list(opened.weights.values())[len(opened.weights) // 2]
    return {
        "length": 1,
        "manifest": data.index(b"max_position_embeddings"),
        "program": data.index(b"arena_bytes"),
        "weights": weight.begin + weight.size_bytes // 2,
        "kernels": data.index(b"\x7fELF") + 5000,
        "text": data.index(b"add_generation_prompt"),
        "checksums": len(data) - 50,
    }


@pytest.mark.parametrize("verb", ["run", "inspect"])
@pytest.mark.parametrize("part", ["length", "manifest", "program", "weights", "kernels", "text", "checksums"])
def test_one_flipped_bit(invoke: Invoke, tiny_engine: Path, tmp_path: Path, part: str, verb: str) -> None:
    damaged = tmp_path / "damaged.engine"
    data = bytearray(tiny_engine.read_bytes())
    data[offsets(tiny_engine)[part]] ^= 4
    damaged.write_bytes(data)
    args = ["--prompt", "the"] if verb == "run" else ["--verify"]
    refused(invoke(verb, damaged, *args), 3, str(damaged))


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_truncated_engine(invoke: Invoke, tiny_engine: Path, tmp_path: Path, kept: int) -> None:
    damaged = tmp_path / "damaged.engine"
    damaged.write_bytes(tiny_engine.read_bytes()[:kept])
    refused(invoke("run", damaged, "--prompt", "the"), 3, str(damaged))


def test_engine_of_another_format(invoke: Invoke, tiny_engine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.engine"
    other.write_bytes(tiny_engine.read_bytes().replace(b'"format_version":"1"', b'"format_version":"7"', 1))
    refused(
        invoke("run", other, "--prompt", "the"), 3, str(other), "format 7", "reads format 1", "tapeout build"
    )


@pytest.mark.parametrize("target", ["cuda:h100", "cpu:aarch64"])
def test_engine_for_another_target(invoke: Invoke, tiny_engine: Path, tmp_path: Path, target: str) -> None:
    from dataclasses import replace

    other = tmp_path / "other.engine"
    with open_engine(tiny_engine) as engine:
        arrays = {
            n: np.frombuffer(engine.weight(n).data, i.dtype).reshape(i.shape)
            for n, i in engine.weights.items()
        }
        write_engine(
            other,
            replace(engine.manifest, target=target),
            engine.program,
            {n: WeightRef((n,), (), i.dtype, i.shape) for n, i in engine.weights.items()},
            arrays.__getitem__,
            {n: engine.kernel(n) for n in engine.kernel_names},
            {n: engine.text(n) for n in engine.text_names},
            source_digest="0" * 64,
        )
        del arrays
    refused(invoke("run", other, "--prompt", "the"), 3, target, f"cpu:{detect_host().level}")


def test_missing_engine(invoke: Invoke, tmp_path: Path) -> None:
    refused(
        invoke("run", tmp_path / "none.engine", "--prompt", "the"),
        2,
        str(tmp_path / "none.engine"),
        "not exist",
    )
    refused(invoke("run", tmp_path, "--prompt", "the"), 2, "is a directory")


def test_a_checkpoint_given_as_engine(invoke: Invoke, tiny_checkpoint: Path) -> None:
    path = tiny_checkpoint / "model.safetensors"
    refused(invoke("run", path, "--prompt", "the"), 3, str(path), "not a tapeout engine")


# ---- requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--prompt", ""], ["prompt 1 is empty"]),
        (["--prompt", "x" * 600], ["tokens", "max_seq_len = 512", "at most 511"]),
        (["--prompt", "a", "--prompt", "x" * 600], ["prompt 2", "max_seq_len = 512"]),
        (
            ["--prompt", "a", "--temperature", "-1", "--top-p", "2", "--min-p", "3", "--max-tokens", "0"],
            ["temperature = -1.0", "top_p = 2.0", "min_p = 3.0", "max_tokens = 0"],
        ),
        (["--prompt", "a", "--temperature", "nan"], ["temperature = nan"]),
        (["--prompt", "a", "--logprobs", "21"], ["logprobs = 21", "[0, 20]"]),
        (["--prompt", "a", "--min-tokens", "9", "--max-tokens", "8"], ["min_tokens = 9", "max_tokens = 8"]),
        (["--prompt", "a", "--stop-token-ids", "300"], ["300", "vocabulary of 300"]),
        (["--prompt", "a", "--kv-cache-tokens", "32", "--max-tokens", "100"], ["KV pages", "the pool has 2"]),
        (["--prompt", "a", "--top-k", "x"], ["'--top-k'", "'x'"]),
    ],
)
def test_requests_that_cannot_run(
    invoke: Invoke, tiny_engine: Path, args: list[str], parts: list[str]
) -> None:
    refused(invoke("run", tiny_engine, *args), 2, *parts)


def test_an_unwritable_place_is_found_before_the_build(invoke: Invoke, tiny_checkpoint: Path) -> None:
    started = time.process_time()
    refused(invoke("build", tiny_checkpoint, "-o", "/nowhere/m.engine"), 2, "/nowhere")
    assert time.process_time() - started < 1
