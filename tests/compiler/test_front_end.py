"""A front end that serves several builds does what a new one does for each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler import front_end
from tapeout.compiler.front_end import FrontEnd, Stages, lower_model
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.progress import SilentProgress


@pytest.fixture(scope="module")
def checkpoint(models: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(models.make_tiny("llama", tmp_path_factory.mktemp("front") / "llama"))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The precisions that are traced, in order."""
    found: list[str] = []
    real = front_end.trace_source

    def counted(source: Any, dtype: str, *rest: Any) -> Any:
        found.append(dtype)
        return real(source, dtype, *rest)

    monkeypatch.setattr(front_end, "trace_source", counted)
    return found


def stages() -> Stages:
    return Stages(SilentProgress())


def options(target: str, **changes: Any) -> BuildOptions:
    return BuildOptions(**{"target": target, "max_seq_len": 64, **changes})


def test_engines_of_one_precision_share_a_trace(checkpoint: str, traces: list[str]) -> None:
    shared = FrontEnd(checkpoint)
    asked = [options(t) for t in ("cuda:sm_80", "cpu", "cuda:h200")]
    asked.append(options("cpu", quantize="int8-dynamic", max_batch_size=3))
    lowered = [shared.lower(o, stages(), lambda _: None) for o in asked]
    assert traces == ["float32"]
    assert lowered[0].module is lowered[2].module, "GPUs have the same passes"
    assert lowered[3].limits.max_batch_size == 3
    for each, one in zip(asked, lowered, strict=True):
        alone = lower_model(checkpoint, each, stages(), lambda _: None)
        assert alone.module.text() == one.module.text()
        assert list(alone.graph.weights.items()) == list(one.graph.weights.items())
        assert (alone.matches, alone.limits, alone.dtype) == (one.matches, one.limits, one.dtype)


def test_another_precision_or_length_is_traced_again(checkpoint: str, traces: list[str]) -> None:
    shared = FrontEnd(checkpoint)
    for dtype, length in (("float32", 64), ("bfloat16", 64), ("float32", 32), ("float32", 64)):
        lowered = shared.lower(options("cpu", dtype=dtype, max_seq_len=length), stages(), lambda _: None)
        assert (lowered.dtype, lowered.limits.max_seq_len) == (dtype, length)
    assert traces == ["float32", "bfloat16", "float32"]


def test_what_was_done_is_no_stage_again_and_graphs_are_dumped_whenever(
    checkpoint: str, tmp_path: Path
) -> None:
    shared, first, second = FrontEnd(checkpoint), stages(), stages()
    shared.lower(options("cpu"), first, lambda _: None)
    shared.lower(options("cpu"), second, lambda _: None)
    assert list(first.seconds) == ["config", "trace", "passes"]
    assert list(second.seconds) == ["config"]
    shared.lower(options("cpu", dump=tmp_path / "d"), stages(), lambda _: None)
    assert (tmp_path / "d" / "00_trace.txt").exists()
