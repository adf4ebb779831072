"""Engines that are damaged or of elsewhere, requests that can never run: one clear message, its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from refusals import refused

from tapeout.compiler.engine_writer import write_engine
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.native.host import detect_host
from tapeout.runtime.engine import open_engine

Invoke = Callable[..., Result]


# ---- engines -----------------------------------------------------------------------------------


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


# ---- requests ----------------------------------------------------------------------------------


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
