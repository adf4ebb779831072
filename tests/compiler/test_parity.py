"""The build's comparison with Hugging Face: a wrong engine gets no name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tapeout.compiler.build as build_module
import tapeout.compiler.front_end as front_end
import tapeout.compiler.parity as parity
from tapeout.compiler.build import build
from tapeout.compiler.graph import Graph
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.report import BuildReport
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine import open_engine
from tapeout.runtime.engine.manifest import ModelFacts
from tapeout.runtime.engine.reader import open_weights_file

Build = Callable[..., BuildReport]


@pytest.fixture
def build_traced(
    family: Callable[..., Any],
    options: Callable[..., BuildOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Build:
    """Builds the tiny llama from the session's traced graph.

    `edit` may change the graph, `change` the checkpoint's tensors.
    """
    tiny = family("llama")

    def run(
        *,
        edit: Callable[[Graph], Graph] = lambda graph: graph,
        change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
        **changes: Any,
    ) -> BuildReport:
        graph = edit(tiny.graph)
        folder = shutil.copytree(tiny.path, tmp_path / "model")
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

        def find(name: str) -> WeightRef:
            return WeightRef.of(tiny.source.checkpoint.tensors[name])

        monkeypatch.setattr(front_end, "trace_source", lambda source, dtype, max_seq_len: (graph, find))
        monkeypatch.setattr(front_end, "run_passes", lambda *_, **__: dict(tiny.counts))
        (tmp_path / "out").mkdir()
        return build(str(folder), tmp_path / "out" / "m.engine", options(**changes))

    return run


def nothing_left(tmp_path: Path) -> bool:
    return list((tmp_path / "out").iterdir()) == []


def only_whole_weights_left(tmp_path: Path) -> bool:
    """A shared weight file is named by its content and complete: it stays for whoever uses it."""
    (path,) = (tmp_path / "out").iterdir()
    file = open_weights_file(path)
    try:
        file.verifier.check_weights(full=True)
        return path.name == f"{file.metadata['digest'][:16]}.weights.safetensors"
    finally:
        file.close()


def swap_gate_and_up(graph: Graph) -> Graph:
    """One recipe in the wrong order: same shape, same dtype, wrong model."""
    name = "model.layers.1.mlp.gate_up_proj.weight"
    gate, up = graph.weights[name].sources
    assert isinstance(gate, WeightRef)
    assert isinstance(up, WeightRef)
    return replace(graph, weights={**graph.weights, name: WeightRef.concat([up, gate])})


@pytest.mark.parametrize("weights", ["embedded", "shared"])
def test_a_wrong_recipe_is_refused_and_leaves_no_engine(
    build_traced: Build, tmp_path: Path, weights: str
) -> None:
    with pytest.raises(
        TapeoutError, match="the engine's output is not Hugging Face's: top-1 equal at "
    ) as caught:
        build_traced(edit=swap_gate_and_up, weights=weights)
    assert caught.value.exit_code == 1
    assert "of 28 positions, logits differ by up to " in caught.value.message
    assert "--no-verify" in caught.value.render()
    assert only_whole_weights_left(tmp_path) if weights == "shared" else nothing_left(tmp_path)


def test_without_verification_the_manifest_says_so(build_traced: Build) -> None:
    report = build_traced(edit=swap_gate_and_up, verify=False)
    assert report.parity == {"verdict": "skipped", "reason": "--no-verify"}
    assert "parity" not in report.stage_seconds
    with open_engine(report.engine) as engine:
        assert engine.manifest.parity == {"verdict": "skipped", "reason": "--no-verify"}


def test_a_nan_in_the_checkpoint_is_refused(build_traced: Build, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = np.nan

    with pytest.raises(
        TapeoutError, match=r"logits are not finite: \d+ of 8400 values are NaN or infinite"
    ) as caught:
        build_traced(change=spoil)
    assert "check the checkpoint" in caught.value.render()
    assert nothing_left(tmp_path)


def test_all_zero_logits_are_refused(build_traced: Build, tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match="logits are all zero"):
        build_traced(change=lambda tensors: tensors["lm_head.weight"].fill(0))
    assert nothing_left(tmp_path)


def test_an_interrupted_comparison_leaves_no_engine(
    build_traced: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module, "compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_traced(weights="shared")
    assert only_whole_weights_left(tmp_path)


FACTS = ModelFacts("A", "a", "float32", "none", 4, 64, "hf:0")
CASES = {"prompts": 1, "prefill_tokens": 1, "decode_tokens": 1}


class TestVerdicts:
    """The rules on made-up logits [1 prompt, 1 position, 4 tokens]."""

    REFERENCE = np.array([[[10.0, 9.0, 0.0, -3.0]]], np.float32)

    def judge(self, engine: list[float], lower: list[float] | None, **facts: str) -> parity.Parity:
        low = None if lower is None else np.array([[lower]], np.float32)
        return parity._judge(
            np.array([[engine]], np.float32), self.REFERENCE, low, replace(FACTS, **facts), CASES
        )

    def test_float32_is_judged_by_the_logits(self) -> None:
        allowed = parity.FLOAT32_TOLERANCE * 10
        near = [10 + 0.9 * allowed, 9.0, 0.0, -3.0]
        assert self.judge(near, None).manifest["verdict"] == "passed"
        with pytest.raises(TapeoutError, match=r"top-1 equal at 100\.0% of 1 positions"):
            self.judge([10 + 1.2 * allowed, 9.0, 0.0, -3.0], None)

    def test_lower_precision_is_judged_by_near_ties(self) -> None:
        other_top = [9.0, 9.5, 0.0, -3.0]
        # HF's own error at the position is 0.6: a gap of 1.0 could have gone either way.
        verdict = self.judge(other_top, [9.4, 9.0, 0.0, -3.0], dtype="bfloat16")
        assert verdict.manifest["verdict"] == "passed"
        assert verdict.figures["top1_match"] == 0
        with pytest.raises(TapeoutError, match=r"HF's float32 top-2 gap <= 2 \* HF's bfloat16 error"):
            self.judge(other_top, [9.6, 9.0, 0.0, -3.0], dtype="bfloat16")

    def test_quantized_is_no_verdict_of_equality(self) -> None:
        verdict = self.judge([1.0, 2.0, 3.0, 4.0], None, quantize="int8-dynamic")
        assert verdict.manifest == {"verdict": "quantized", "cases": CASES, "tolerance": None}
        assert verdict.figures["top1_match"] == 0
        assert verdict.figures["max_logit_difference"] == 9.0
