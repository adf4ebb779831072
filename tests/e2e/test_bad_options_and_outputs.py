"""Options that cannot be, places that cannot be written, builds that end half-way: no half of a file."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from refusals import refused

Invoke = Callable[..., Result]


# ---- options -----------------------------------------------------------------------------------


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


# ---- outputs -----------------------------------------------------------------------------------


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


def test_an_unwritable_place_is_found_before_the_build(
    invoke: Invoke, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*_: object) -> None:
        pytest.fail("the model was traced")

    monkeypatch.setattr("tapeout.compiler.front_end.trace_source", trace)
    refused(invoke("build", tiny_checkpoint, "-o", "/nowhere/m.engine"), 2, "/nowhere")
