"""What only a process of its own shows: what it imports, and what compute-sanitizer says of its kernels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import probe
import pytest
from gpu_bundle import Bundle

PROBE = Path(probe.__file__)
RACECHECK_SECONDS = 20


@pytest.fixture(scope="module")
def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
    return found


def test_neither_torch_nor_a_compiler_is_loaded(bundle: Bundle, python: Callable[..., Any]) -> None:
    engine = bundle.path("llama.engine")
    done = python(PROBE, engine)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["heavy"] == []
    assert found["ids"] == probe.ask(str(engine), short=False)


def _sanitize(run: Callable[..., Any], sanitizer: str, tool: str, *args: Any, timeout: float) -> str:
    """What the tool printed; skips where it cannot work."""
    done = run(*args, before=(sanitizer, "--tool", tool), timeout=timeout)
    text: str = done.stdout + done.stderr
    if "Device not supported" in text:
        pytest.skip(f"{tool}: Device not supported")
    assert '"ids"' in text, text[-2000:]
    return text


# invariant and bf16_ are in bfloat16: tensor cores. The families' kernels are none that other tests run here.
@pytest.mark.parametrize(
    "model",
    [
        "gemma2",
        "qwen3",
        "invariant",
        "family_bloom",
        "family_deepseek_v3",
        "family_apertus",
        "family_falcon_new",
        "bf16_deepseek_v3",
        "bf16_bloom",
    ],
)
def test_memcheck_finds_nothing(
    bundle: Bundle, python: Callable[..., Any], sanitizer: str, model: str
) -> None:
    text = _sanitize(python, sanitizer, "memcheck", PROBE, bundle.path(f"{model}.engine"), timeout=60)
    assert "ERROR SUMMARY: 0 errors" in text, text[:4000]


@pytest.mark.parametrize("model", ["llama", "invariant"])
def test_racecheck_is_reported(
    bundle: Bundle, python: Callable[..., Any], sanitizer: str, report: Callable[[str], None], model: str
) -> None:
    """Reported, not judged: it may take long, and it does not know every way kernels synchronize."""
    args = PROBE, bundle.path(f"{model}.engine"), "--short"
    try:
        text = _sanitize(python, sanitizer, "racecheck", *args, timeout=RACECHECK_SECONDS)
        found = " ".join(re.findall(r"RACECHECK SUMMARY: (.*)", text)) or text[-300:]
    except subprocess.TimeoutExpired:
        found = f"not done within {RACECHECK_SECONDS} s"
    report(f"racecheck, {model}: {found}")
