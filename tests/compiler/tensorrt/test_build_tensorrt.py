"""`tapeout build --tactics tensorrt`: an engine of real TensorRT-RTX segments, inspected, refused elsewhere.

Kernels are not compiled (fake_kernels.py); segments are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_kernels import compile_nothing

from tapeout.cli.main import cli
from tapeout.compiler import cuda_plan
from tapeout.compiler.front_end import FrontEnd, Lowered
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.tensorrt import choice
from tapeout.plugins.cuda import TENSORRT
from tapeout.runtime.engine import open_engine
from tapeout.runtime.executors.cuda import driver

FLAGS = ["--dtype", "bf16", "--max-batch-size", "4", "--max-num-tokens", "128", "--max-seq-len", "64"]


@pytest.fixture(scope="module", autouse=True)
def no_kernels() -> Iterator[None]:
    def no_device(ordinal: int = 0) -> None:
        raise ImportError("this machine has no GPU")

    made: dict[str, Lowered] = {}

    lower = FrontEnd.lower

    def lower_once(front_end: FrontEnd, options: BuildOptions, *rest: Any) -> Lowered:
        """Tracing takes seconds and says nothing about segments."""
        if options.target not in made:
            made[options.target] = lower(front_end, options, *rest)
        return made[options.target]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrontEnd, "lower", lower_once)
        patch.setattr(cuda_plan, "compile_all", compile_nothing)
        patch.setattr(driver, "open_device", no_device)
        yield


@pytest.fixture(scope="module")
def checkpoint(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = models.make_tiny("qwen3", tmp_path_factory.mktemp("qwen3") / "model")
    return path


def build(checkpoint: Path, output: Path, *flags: str) -> Result:
    arguments = ["build", str(checkpoint), "-o", str(output), *FLAGS, *flags]
    return CliRunner().invoke(cli, arguments)


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, rtx: str) -> Path:
    """A folder with two engines of one timing cache, and the regions' ONNX files."""
    folder = tmp_path_factory.mktemp("engines")
    common = ("--target", "cuda:sm_89", "--tactics", "tensorrt", "--timing-cache", str(folder / "times.json"))
    first = build(checkpoint, folder / "first.engine", *common, "--keep-onnx", str(folder / "regions"))
    assert first.exit_code == 0, first.output
    assert f"segments by TensorRT-RTX {rtx} were built and not executed" in first.output
    assert build(checkpoint, folder / "second.engine", *common).exit_code == 0
    return folder


def test_the_engine_says_what_it_is(built: Path, rtx: str) -> None:
    with open_engine(built / "first.engine") as engine:
        manifest, table = engine.manifest, engine.launches
        assert manifest.versions["tensorrt_rtx"] == rtx
        assert manifest.parity["segments"] == "built; never executed, neither compared nor timed"
        assert not manifest.timed
        assert table is not None
        assert len(table.segments) == len(engine.segment_names) == 3
        assert len(table.regions) == 3
        covered = {
            r.tactic for ranges in engine.program.tactics.values() for r in ranges if r.tactic == TENSORRT
        }
        assert covered == {TENSORRT}
        # Ops within segments have no kernels of ours; attention and sampling do.
        own = {key.partition("(")[0] for key in table.ranges}
        assert own == {"rope_attention"}
        engine.verify_all()


def test_the_same_cache_gives_the_same_engine(built: Path) -> None:
    assert (built / "first.engine").read_bytes() == (built / "second.engine").read_bytes()
    report = json.loads((built / "second.engine.report.json").read_text())
    assert [s["regions"] for s in report["segments"]] == [1, 1, 1]
    assert all(s["plan_bytes"] > s["onnx_bytes"] > 0 and s["seconds"] > 0 for s in report["segments"])


def test_a_fine_tune_keeps_the_segments(built: Path, models: ModuleType, tmp_path: Path) -> None:
    tuned = models.make_tiny("qwen3", tmp_path / "tuned", seed=1)
    refitted = tmp_path / "refitted.engine"
    first = str(built / "first.engine")
    result = CliRunner().invoke(cli, ["refit", first, "--weights", str(tuned), "-o", str(refitted)])
    assert result.exit_code == 0, result.output
    with open_engine(built / "first.engine") as before, open_engine(refitted) as after:
        names = before.segment_names
        assert names
        assert [after.segment(n) for n in after.segment_names] == [before.segment(n) for n in names]
        assert after.digest != before.digest


def test_a_flipped_byte_of_a_segment_is_seen(built: Path, tmp_path: Path) -> None:
    data = bytearray((built / "first.engine").read_bytes())
    with open_engine(built / "first.engine") as engine:
        at = data.index(engine.segment(engine.segment_names[0]))
    data[at + 1000] ^= 1
    copy = tmp_path / "damaged.engine"
    copy.write_bytes(data)
    told = CliRunner().invoke(cli, ["inspect", str(copy), "--verify"])
    assert told.exit_code == 3
    assert "segments/" in told.output


def test_inspect_shows_segments_profiles_and_layers(built: Path, rtx: str) -> None:
    told = CliRunner().invoke(cli, ["inspect", str(built / "first.engine")])
    assert told.exit_code == 0, told.output
    for expected in (
        f"needs      tensorrt_rtx {rtx}",
        "segments  built; never executed",
        f"segments (TensorRT engines by tensorrt_rtx {rtx})",
        "ops        linear_add, norm_linear, linear_add, norm_linear",
        "weights    w0 bfloat16[64,64], w1 bfloat16[64], w2 bfloat16[192,64]",
        "profile 0  T 1 to 64, tuned for 8, R 1 to 4, tuned for 4",
        "profile 1  T 65 to 128, tuned for 128",
        "up to 128 rows tensorrt",
    ):
        assert expected in told.output
    assert "Silu" in told.output
    data = json.loads(CliRunner().invoke(cli, ["inspect", str(built / "first.engine"), "--json"]).output)
    assert data["libraries"] == {"tensorrt_rtx": [rtx]}
    assert [len(s["regions"]) for s in data["segments"]] == [1, 1, 1]
    assert sum(s["size_bytes"] for s in data["segments"]) == data["sizes"]["segments"]
    assert (
        CliRunner()
        .invoke(cli, ["inspect", str(built / "first.engine"), "--onnx", str(built / "whole.onnx")])
        .exit_code
        == 0
    )


def test_the_regions_stay_as_onnx(built: Path) -> None:
    files = sorted((built / "regions").iterdir())
    assert [f.name[:9] for f in files] == ["region-0-", "region-1-", "region-2-"]
    for file in files:
        onnx.checker.check_model(file)


def test_another_machine_is_refused_by_name(built: Path) -> None:
    told = CliRunner().invoke(cli, ["run", str(built / "first.engine"), "--prompt", "the cat"])
    assert told.exit_code == 3
    assert "was built for cuda:sm_89, this machine is cpu:" in told.output


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (
            ("--target", "cuda:sm_90"),
            5,
            "TensorRT-RTX builds for sm_75, sm_80, sm_86, sm_89, sm_120, sm_121, not for sm_90",
        ),
        (("--target", "cuda:b200"), 5, "not for sm_100"),
        (("--target", "cpu"), 2, "'tensorrt' is for cuda targets"),
        (("--target", "cuda:sm_89", "--batch-invariant"), 2, "goes against batch_invariant"),
    ],
)
def test_what_cannot_be_built_is_refused(
    flags: tuple[str, ...], code: int, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    told = build(checkpoint, tmp_path / "x.engine", "--tactics", "tensorrt", *flags)
    assert told.exit_code == code
    assert message in told.output
    assert not list(tmp_path.iterdir())


def test_a_missing_package_says_what_to_install(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "installed_version", lambda name: None)
    told = build(checkpoint, tmp_path / "x.engine", "--tactics", "tensorrt", "--target", "cuda:sm_89")
    assert told.exit_code == 5
    assert "TensorRT-RTX is not installed" in told.output
    assert "pip install 'tapeout[tensorrt-rtx]', or build with --tactics native" in told.output


def test_a_dry_run_builds_nothing(checkpoint: Path, tmp_path: Path, rtx: str) -> None:
    told = build(
        checkpoint, tmp_path / "x.engine", "--tactics", "tensorrt", "--target", "cuda:sm_89", "--dry-run"
    )
    assert told.exit_code == 0, told.output
    assert not list(tmp_path.iterdir())


def test_regions_are_kept_for_cuda_targets_only(checkpoint: Path, tmp_path: Path) -> None:
    told = build(
        checkpoint, tmp_path / "x.engine", "--target", "cpu", "--keep-onnx", str(tmp_path / "regions")
    )
    assert told.exit_code == 2
    assert "keep_onnx" in told.output
    assert not list(tmp_path.iterdir())
