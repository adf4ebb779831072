"""Random weights for an engine whose real ones are elsewhere."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tapeout.cli.main import cli
from tapeout.compiler.build import build
from tapeout.compiler.dummy_weights import write_dummy_weights
from tapeout.plugins.errors import EngineError
from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine import open_engine

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory, family, options) -> Path:  # type: ignore[no-untyped-def]
    """An engine with shared weights whose weight file was taken away."""
    path: Path = tmp_path_factory.mktemp("dummy") / "tiny.engine"
    report = build(str(family("llama").path), path, options(weights="shared", verify=False))
    (weights,) = [name for name in report.file_bytes if name != path.name]
    path.with_name(weights).unlink()
    return path


def test_a_dummy_file_makes_the_engine_run_and_warns(
    shared_engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineError, match="does not stand beside it"):
        open_engine(shared_engine)
    write_dummy_weights(shared_engine, 7)
    with caplog.at_level(logging.WARNING, "tapeout"), LLM(str(shared_engine)) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
    assert "random weights (seed 7)" in caplog.text


def test_values_are_seeded_finite_and_not_zero(shared_engine: Path) -> None:
    files = []
    for seed in ("1", "1", "2"):
        for old in shared_engine.parent.glob("*.safetensors"):
            old.unlink()
        assert CliRunner().invoke(cli, ["weights", str(shared_engine), "--dummy", seed]).exit_code == 0
        (path,) = shared_engine.parent.glob("*.safetensors")
        files.append(path.read_bytes())
    assert files[0] == files[1] != files[2]
    with open_engine(shared_engine) as engine:
        for name in engine.weights:
            values = np.frombuffer(engine.weight(name).data, np.float32)
            assert np.isfinite(values).all(), name
            assert (values != 0).mean() > 0.99, name


def test_an_embedded_engine_has_no_file_to_write(tmp_path: Path, family, options) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "embedded.engine"
    build(str(family("llama").path), path, options(verify=False))
    result = CliRunner().invoke(cli, ["weights", str(path), "--dummy", "1"])
    assert result.exit_code == 2
    assert "--weights shared" in result.output
