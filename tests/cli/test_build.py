"""`tapeout build`: what reaches the compiler and what is printed. The compiler is a stand-in."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tapeout.cli.build import default_name
from tapeout.cli.main import cli
from tapeout.compiler.options import FIELDS, BuildOptions
from tapeout.compiler.progress import Progress
from tapeout.compiler.report import BuildReport, MemoryPlan, TacticTiming, report_path, write_report
from tapeout.plugins.errors import UnsupportedError
from tapeout.runtime.engine.manifest import Limits

MIB = 1 << 20


def report(output: Path, options: BuildOptions) -> BuildReport:
    return BuildReport(
        engine=output,
        dry_run=options.dry_run,
        target="cpu:x86_64_v3",
        dtype="float32",
        quantize=options.quantize,
        limits=Limits(8, 512, 2048, 32),
        memory=MemoryPlan(weights_bytes=500 * MIB, arena_bytes=20 * MIB, kv_cache_bytes=700 * MIB),
        file_bytes={output.name: 501 * MIB},
        section_bytes={"weights": 500 * MIB, "text": MIB},
        stage_seconds={"trace": 10.0, "write": 2.5},
        peak_memory_bytes=1500 * MIB,
        passes={"rms_norm": 61},
        tactics=(TacticTiming("linear(...)", 1, "onednn", 12.5, {"matmul": 20.0}, {"int8": "not asked"}),),
        timed=True,
        parity={"verdict": "passed"},
        options=options.effective(),
        warnings=("the model is small",),
    )


class Compiler:
    """Stands in for tapeout.compiler.build and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Path, BuildOptions]] = []
        self.error: BaseException | None = None

    def build(
        self,
        model: str,
        output: Path,
        options: BuildOptions,
        progress: Progress | None,
        inputs: tuple[Path, ...] = (),
    ) -> BuildReport:
        self.calls.append((model, output, options))
        assert progress is not None
        with progress.stage("trace", "30 layers") as stage:
            stage.update("210 nodes")
            if self.error is not None:
                raise self.error
        progress.info("timing cache: 12 hits")
        return report(output, options)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    fake, module = Compiler(), ModuleType("tapeout.compiler.build")
    module.build = fake.build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tapeout.compiler.build", module)
    monkeypatch.chdir(tmp_path)
    return fake


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["build", *args])


def ok(*args: str) -> Result:
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    return result


def test_help_names_the_dtypes_that_engines_have(compiler: Compiler) -> None:
    """float16 is understood all the same: the build knows what to take instead of it."""
    assert "[auto|float32|bfloat16|fp32|bf16]" in ok("--help").stdout
    ok("model", "-o", "m.engine", "--dtype", "fp16")
    assert compiler.calls[-1][2].dtype == "float16"
    refused = run("model", "-o", "m.engine", "--dtype", "int4")
    assert refused.exit_code == 2
    assert "'int4' is not one of 'auto', 'float32', 'bfloat16', 'fp32', 'bf16'" in refused.stderr


def test_every_option_reaches_the_compiler(compiler: Compiler) -> None:
    flags: dict[str, tuple[Any, list[str]]] = {
        "target": ("cpu", ["--target", "cpu"]),
        "dtype": ("bfloat16", ["--dtype", "bf16"]),
        "max_batch_size": (4, ["--max-batch-size", "4"]),
        "max_num_tokens": (128, ["--max-num-tokens", "128"]),
        "max_seq_len": (256, ["--max-seq-len", "256"]),
        "tokens_per_page": (16, ["--tokens-per-page", "16"]),
        "timing_cache": (Path("cache.json"), ["--timing-cache", "cache.json"]),
        "require_timed": (True, ["--require-timed"]),
        "weights": ("shared", ["--weights", "shared"]),
        "quantize": ("int8-dynamic", ["--quantize", "int8-dynamic"]),
        "batch_invariant": (True, ["--batch-invariant"]),
        "tactics": ("native", ["--tactics", "native"]),
        "verify": (False, ["--no-verify"]),
        "seed": (7, ["--seed", "7"]),
        "trust_remote_code": (True, ["--trust-remote-code"]),
        "revision": ("v1", ["--revision", "v1"]),
        "dump": (Path("graphs"), ["--dump", "graphs"]),
        "dry_run": (True, ["--dry-run"]),
    }
    others = {"pack", "keep_onnx"}  # one makes no engine, one is for other targets
    assert set(flags) == set(FIELDS) - others
    ok("org/model", "-o", "m.engine", *[arg for _, args in flags.values() for arg in args])
    expected = BuildOptions(**{name: value for name, (value, _) in flags.items()})
    assert compiler.calls == [("org/model", Path("m.engine"), expected)]


def test_no_flags_give_the_defaults(compiler: Compiler) -> None:
    ok("model.gguf", "--output", "m.engine")
    assert compiler.calls == [("model.gguf", Path("m.engine"), BuildOptions())]


def test_underscores_and_dashes_are_the_same(compiler: Compiler) -> None:
    ok(
        "m",
        "-o",
        "a.engine",
        "--max_batch_size=3",
        "--timing_cache",
        "t.json",
        "--no_verify",
        "--quantize",
        "int8_dynamic",
    )
    options = compiler.calls[0][2]
    assert (options.max_batch_size, options.timing_cache, options.verify) == (3, Path("t.json"), False)
    assert options.quantize == "int8-dynamic"


def test_flag_wins_over_file(compiler: Compiler) -> None:
    Path("c.yaml").write_text("max-batch-size: 16\nmax_seq_len: 64\nverify: false\n")
    ok("m", "-o", "a.engine", "--config", "c.yaml", "--max-batch-size", "2", "--verify")
    options = compiler.calls[0][2]
    assert (options.max_batch_size, options.max_seq_len, options.verify) == (2, 64, True)


def test_unknown_key_of_a_file_is_a_usage_error(compiler: Compiler) -> None:
    Path("c.yaml").write_text("max-batch: 16\n")
    result = run("m", "-o", "a.engine", "--config", "c.yaml")
    assert result.exit_code == 2
    assert "c.yaml:1: max-batch: unknown key, did you mean max-batch-size?" in result.stderr
    assert compiler.calls == []


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (["--target", "cuda"], 2, "cuda:sm_NN or cuda:SKU"),
        (["--target", "cuda:sm_70"], 5, "expected cuda: and one of a100"),
        (["--target", "cuda:sm_90", "--quantize", "int8-dynamic"], 5, "'int8-dynamic' has no kernels"),
    ],
)
def test_what_no_gpu_can_be_is_refused_at_once(
    compiler: Compiler, args: list[str], code: int, part: str
) -> None:
    result = run("m", "-o", "a.engine", *args)
    assert result.exit_code == code
    assert part in result.stderr
    assert compiler.calls == []


def test_gpus_reach_the_compiler(compiler: Compiler) -> None:
    for target in ("cuda:sm_90", "cuda:h200"):
        ok("m", "-o", "a.engine", "--target", target)
    assert [options.target for _, _, options, *_ in compiler.calls] == ["cuda:sm_90", "cuda:h200"]


def test_output_is_required_unless_nothing_is_written(compiler: Compiler) -> None:
    result = run("m")
    assert result.exit_code == 2
    assert "--output" in result.stderr
    ok("org/Some-1B", "--dry-run")
    assert compiler.calls[0][1] == Path("Some-1B.engine")


@pytest.mark.parametrize(
    ("model", "name"),
    [("a/b", "b.engine"), ("x/b.gguf", "b.engine"), (".", "model.engine"), ("./b/", "b.engine")],
)
def test_default_name(model: str, name: str) -> None:
    assert default_name(model) == name


def test_bad_outputs_are_refused_before_the_work(compiler: Compiler, tmp_path: Path) -> None:
    for output, expected in [(".", "is a directory"), ("missing/a.engine", "does not exist")]:
        result = run("m", "-o", output)
        assert result.exit_code == 2
        assert expected in result.stderr
    assert compiler.calls == []


def test_last_lines_tell_paths_sizes_seconds_and_memory(compiler: Compiler) -> None:
    lines = ok("m", "-o", "a.engine").stdout.splitlines()
    assert lines[0] == "warning: the model is small"
    assert lines[-3:] == ["wrote", "  a.engine  501.0 MiB", "12.5 s, peak memory 1.5 GiB"]
    assert "parity: passed" in lines


def test_dry_run_tells_memory_and_the_limit_to_lower(compiler: Compiler) -> None:
    out = ok("m", "-o", "a.engine", "--dry-run").stdout
    assert "KV cache  700.0 MiB" in out
    assert "total     1.2 GiB  (the KV cache is largest: lower --max-seq-len or --max-batch-size)" in out
    assert "max-num-tokens   512 tokens a step" in out
    assert "would write" in out
    assert "parity" not in out


def test_json_is_one_document_and_nothing_else(compiler: Compiler) -> None:
    result = ok("m", "-o", "a.engine", "--json", "--max-batch-size", "2")
    data = json.loads(result.stdout)
    assert result.stderr == ""
    assert data["engine"] == "a.engine"
    assert data["options"]["max_batch_size"] == 2
    assert data["memory"]["total_bytes"] == 1220 * MIB
    assert data["tactics"][0]["rejected"] == {"int8": "not asked"}
    assert {f.name for f in dataclasses.fields(BuildReport)} < data.keys()


def test_progress_goes_to_stderr_in_plain_lines(compiler: Compiler) -> None:
    result = ok("m", "-o", "a.engine", "--seed", "3")
    lines = result.stderr.splitlines()
    assert lines[0] == "options: seed=3"
    assert lines[1] == "trace ... 30 layers"
    assert lines[2].startswith("trace ")
    assert lines[2].endswith(" s  210 nodes")
    assert lines[3] == "timing cache: 12 hits"


@pytest.mark.parametrize(
    ("error", "code"),
    [(UnsupportedError("unknown architecture X"), 5), (KeyboardInterrupt(), 130), (OSError("x"), 1)],
)
def test_a_failed_stage_is_told_and_nothing_printed_on_stdout(
    compiler: Compiler, error: BaseException, code: int
) -> None:
    compiler.error = error
    result = run("m", "-o", "a.engine")
    assert result.exit_code == code
    assert "trace failed" in result.stderr
    assert result.stdout == ""


def test_report_path() -> None:
    assert report_path(Path("x/m.engine")) == Path("x/m.engine.report.json")


def test_a_written_report_is_what_json_prints(tmp_path: Path) -> None:
    path = report_path(tmp_path / "m.engine")
    path.write_text("old")
    made = report(tmp_path / "m.engine", BuildOptions())
    write_report(made, path)
    assert json.loads(path.read_text()) == made.to_json()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("plan", "limit"),
    [
        ((9, 1, 1), "--quantize"),
        ((1, 9, 1), "arena is largest: lower --max-num-tokens"),
        ((1, 1, 9), "--max-seq-len"),
        ((1, 1, 1, 9), "workspace is largest: lower --max-num-tokens"),
    ],
)
def test_advice_names_the_limit_of_the_largest(plan: tuple[int, ...], limit: str) -> None:
    assert limit in MemoryPlan(*plan).advice()
    assert MemoryPlan(*plan).total_bytes == sum(plan)
