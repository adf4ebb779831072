"""Engines that this machine's GPU cannot run are refused by the real driver, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu_bundle import Bundle

from tapeout.plugins.errors import CapacityError, EngineIncompatibleError
from tapeout.runtime import LLM
from tapeout.runtime.engine import open_engine
from tapeout.runtime.executors import load_executor
from tapeout.runtime.executors.cuda.driver import open_device

BUDGET = ("weights", "arena", "workspace", "kv cache (")
MIB = 1 << 20


def free_bytes() -> int:
    device = open_device(0)
    device.make_current()
    return device.free_bytes()


def test_another_compute_capability(bundle: Bundle) -> None:
    free = free_bytes()
    with pytest.raises(EngineIncompatibleError) as error:
        LLM(bundle.path("other_sm.engine"))
    gpu = open_device(0).facts
    assert f"this GPU is {gpu.name}, sm_{gpu.sm}" in error.value.message
    assert "tapeout build" in error.value.hint
    assert free - free_bytes() < MIB


def test_strict_sku_needs_an_engine_that_names_a_model(bundle: Bundle) -> None:
    with pytest.raises(EngineIncompatibleError, match="--strict-sku"):
        LLM(bundle.path("llama.engine"), strict_sku=True)


def test_an_arena_no_gpu_has_room_for(bundle: Bundle) -> None:
    free = free_bytes()
    with pytest.raises(CapacityError) as error:
        LLM(bundle.path("huge.engine"))
    for part in BUDGET:
        assert part in error.value.message
    assert "--max-num-tokens" in error.value.hint
    assert free - free_bytes() < MIB


def test_a_kv_cache_no_gpu_has_room_for(bundle: Bundle) -> None:
    free = free_bytes()
    with (
        open_engine(bundle.path("llama.engine"), verify=False) as engine,
        pytest.raises(CapacityError) as error,
    ):
        load_executor(engine, num_pages=10**9)
    for part in BUDGET:
        assert part in error.value.message
    assert "kv cache (1000000000 pages of 16 tokens)" in error.value.hint
    assert free - free_bytes() < MIB


@pytest.mark.parametrize(("engine", "code"), [("other_sm", 3), ("huge", 4)])
def test_exit_codes(bundle: Bundle, tapeout: Callable[..., Any], engine: str, code: int) -> None:
    done = tapeout("run", bundle.path(f"{engine}.engine"), "--prompt", "the cat", "--max-tokens", "2")
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
