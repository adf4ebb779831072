"""Engines for GPUs, built on a machine without one: launches, buckets, alignment, determinism."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

from tapeout.cli.main import cli
from tapeout.compiler import cuda_plan
from tapeout.compiler.alignment import check_alignment
from tapeout.compiler.build import build
from tapeout.compiler.cuda_plan import choose_cuda
from tapeout.compiler.front_end import FrontEnd
from tapeout.compiler.onnx_export import export_engine
from tapeout.compiler.onnx_export.op_schemas import DOMAIN
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.plan import buckets
from tapeout.compiler.targets import SKUS, cuda_target
from tapeout.plugins.case import signature
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import CudaTarget
from tapeout.plugins.errors import EngineCorruptError, UnsupportedError
from tapeout.plugins.registry import cuda_tactics
from tapeout.runtime.engine import Engine, open_engine
from tapeout.runtime.engine.container import DTYPES
from tapeout.runtime.engine.launches import Launch, LaunchTable
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program_check import row_limits

LIMITS = {"max_batch_size": 4, "max_num_tokens": 24, "max_seq_len": 64, "tokens_per_page": 16}
TYPE_OF_KIND = {"f32": "fp32", "i64": "i64"}
POINTERS = {"input", "output", "weight", "step", "workspace"}


@pytest.fixture(scope="module")
def checkpoint(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = models.make_tiny("llama", tmp_path_factory.mktemp("llama") / "model")
    return path


@pytest.fixture(scope="module")
def front_end(checkpoint: Path) -> FrontEnd:
    """The model, traced once for engines of one precision."""
    return FrontEnd(str(checkpoint))


@pytest.fixture(scope="module")
def built(
    checkpoint: Path, front_end: FrontEnd, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`built(target, **options)`: an engine of a tiny Llama, made once."""
    folder, made = tmp_path_factory.mktemp("engines"), {}

    def get(target: str, **options: Any) -> Path:
        key = repr((target, sorted(options.items())))
        if key not in made:
            made[key] = folder / f"{len(made)}.engine"
            chosen = BuildOptions(target=target, **{**LIMITS, **options})
            report = build(str(checkpoint), made[key], chosen, front_end=front_end)
            made[key].with_suffix(".txt").write_text(repr(report))
        return made[key]

    return get


@pytest.fixture(scope="module", params=["cuda:sm_90", "cuda:sm_80"])
def engine(built: Callable[..., Path], request: pytest.FixtureRequest) -> Iterator[Engine]:
    with open_engine(built(request.param)) as engine:
        yield engine


def table_of(engine: Engine) -> LaunchTable:
    assert engine.launches is not None
    return engine.launches


def launches_of(table: LaunchTable) -> list[Launch]:
    return [*table.receive, *(launch for r in table.all_ranges() for launch in r.launches)]


def test_the_manifest_says_what_was_not_done(engine: Engine, built: Callable[..., Path]) -> None:
    manifest = engine.manifest
    assert manifest.timed is False
    assert manifest.parity == {"verdict": "skipped", "reason": "the build does not run cuda engines yet"}
    assert set(manifest.versions) >= {"triton", "ptxas", "torch", "tapeout"}
    report = json.loads(engine.path.with_name(engine.path.name + ".report.json").read_text())
    assert report["warnings"] == [f"tactics for {manifest.target} are defaults, nothing was timed"]
    assert table_of(engine).sm == int(manifest.target.removeprefix("cuda:sm_"))


def test_buckets_and_ranges_cover_the_limits(engine: Engine) -> None:
    table, rows = table_of(engine), row_limits(engine.manifest.limits)
    assert table.row_buckets == (1, 2, 4, 8, 16, 24)
    assert table.logit_buckets == (1, 2, 4)
    assert tuple(table.ranges) == tuple(engine.program.tactics)
    for key, ranges in table.ranges.items():
        tactics = engine.program.tactics[key]
        assert [r.max_rows for r in ranges] == [t.max_rows for t in tactics]
        leading = str(engine.program.signatures[key].outputs[0].shape[0])
        assert ranges[-1].max_rows == rows[leading]
    assert table.sample[-1].max_rows == table.sample_full[-1].max_rows == rows["R"]
    assert {len(r.launches) for r in table.sample} == {2}  # what a plain step pays
    assert {key.partition("(")[0] for key in table.decode_ranges} == {"rope_attention"}
    assert all(row[-1].max_rows == 4 for row in table.decode_ranges.values())
    assert table.workspace_bytes >= max(r.workspace_bytes for r in table.all_ranges())


def test_launches_pass_what_the_kernels_take(
    checkpoint: Path, front_end: FrontEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = {}

    def noting(specs: Any, sm: int, **options: Any) -> Any:
        kernels = compile_all(specs, sm, **options)
        compiled.update({k.cubin: k for k in kernels})
        return kernels

    compile_all = cuda_plan.compile_all
    monkeypatch.setattr(cuda_plan, "compile_all", noting)
    options = BuildOptions(target="cuda:sm_90", dtype="bf16", **LIMITS)
    build(str(checkpoint), tmp_path / "e", options, front_end=front_end)
    with open_engine(tmp_path / "e") as engine:
        table = table_of(engine)
        assert len(launches_of(table)) > len(table.kernels) > 10
        for launch in launches_of(table):
            entry = table.kernels[launch.kernel]
            kernel = compiled[engine.kernel(entry.blob)]
            kinds = ["*" if a.kind in POINTERS else TYPE_OF_KIND.get(a.kind, "i32") for a in launch.args] + [
                "*"
            ] * entry.scratch_pointers
            assert kinds == ["*" if k.startswith("*") else k for k in kernel.arguments], entry.symbol
            assert (entry.symbol, entry.threads) == (kernel.symbol, kernel.threads)
            blocks = [dim.blocks(24) for dim in launch.grid]
            assert len(blocks) == 3
            assert min(blocks) >= 1
            scratch = entry.scratch_bytes * blocks[0] * blocks[1] * blocks[2]
            assert scratch <= table.scratch_bytes or not entry.scratch_bytes


def test_operands_are_aligned_for_wide_loads(engine: Engine) -> None:
    program = engine.program
    check_alignment(program)
    assert program.logits.shape == ("R", 300)
    assert program.logits.strides == (304, 1)  # rows of 300 are padded
    limit = engine.manifest.limits.max_batch_size * 304 * DTYPES[program.logits.dtype][1]
    (buffer,) = (b for b in program.buffers if b.name == program.logits.buffer)
    assert buffer.size_bytes == limit
    record = program.records[-1]
    odd = replace(record, outputs=(replace(record.outputs[0], strides=(300, 1)),))
    shifted = replace(record, outputs=(replace(record.outputs[0], offset=2),))
    with pytest.raises(UnsupportedError) as error:
        check_alignment(replace(program, records=(odd, record, shifted)))
    assert error.value.message.count("linear") == 2
    assert "--target cpu" in str(error.value.hint)


def test_the_table_survives_its_json(engine: Engine) -> None:
    table = table_of(engine)
    data = json.loads(json.dumps(table.to_json()))
    assert LaunchTable.from_json(data) == table
    with pytest.raises(EngineCorruptError, match="unknown \\['colour'\\]"):
        LaunchTable.from_json({**data, "colour": 1})


def test_cubins_are_for_the_sm_and_none_is_left_over(engine: Engine) -> None:
    table = table_of(engine)
    assert {k.blob for k in table.kernels} == set(engine.kernel_names)
    for name in engine.kernel_names:
        cubin = engine.kernel(name)
        assert cubin[:4] == b"\x7fELF"
        # CUDA ELF flags hold the SM: byte 0 in the old form, bytes 1 to 2 in the new one.
        flags = int.from_bytes(cubin[48:52], "little")
        assert table.sm in {flags & 0xFF, flags >> 8 & 0xFF}, hex(flags)


def test_the_same_build_gives_the_same_bytes(
    built: Callable[..., Path], checkpoint: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.engine"
    build(str(checkpoint), again, BuildOptions(target="cuda:sm_90", **LIMITS))  # type: ignore[arg-type]
    assert again.read_bytes() == built("cuda:sm_90").read_bytes()


def test_inspect_shows_a_cuda_engine(engine: Engine) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(engine.path), "--verify", "--json"])
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["manifest"]["target"] == engine.manifest.target
    assert data["manifest"]["timed"] is False
    text = CliRunner().invoke(cli, ["inspect", str(engine.path)])
    assert engine.manifest.target in text.stdout
    assert "ptxas version" in text.stdout
    (attention,) = (t for t in data["tactics"] if t["decode_ranges"])
    (row,) = table_of(engine).decode_ranges.values()
    assert attention["decode_ranges"] == [{"max_rows": r.max_rows, "tactic": r.tactic} for r in row]
    assert text.stdout.count("steps that only decode\n    up to ") == 1


def test_running_without_a_gpu_is_refused(engine: Engine) -> None:
    from tapeout.runtime.executors.cuda import driver

    try:
        driver.open_device()
    except Exception:
        result = CliRunner().invoke(cli, ["run", str(engine.path), "--prompt", "a"])
        assert result.exit_code == 3
        assert f"built for {engine.manifest.target}" in result.stderr
        assert "no usable NVIDIA GPU" in result.stderr
    else:
        pytest.skip("this machine has a GPU")


def test_a_dry_run_compiles_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_plan, "compile_all", None)
    cache = tmp_path / "cache.json"
    options = BuildOptions(target="cuda:h200", dry_run=True, timing_cache=cache)
    report = build(str(checkpoint), tmp_path / "e", options)
    assert (report.target, report.limits.max_batch_size, report.limits.max_num_tokens) == (
        "cuda:h200",
        64,
        2048,
    )
    assert [w.split(" are ")[0] for w in report.warnings] == ["tactics for cuda:h200", *report.warnings[1:]]
    assert f"timing cache {cache} has no timings that serve cuda:h200" in report.warnings[1]
    assert list(tmp_path.iterdir()) == []
    fused = ("fuse_rope_attention", "select_rows_early", "fuse_linear_add", "fuse_norm_linear")
    assert [report.passes[name] for name in fused] == [2, 1, 4, 5]


def test_the_graph_of_an_engine_for_a_gpu_is_exported(built: Callable[..., Path]) -> None:
    """Its rows are padded in the program, which the graph is compared with."""
    path = built("cuda:sm_90")
    export_engine(path, path.with_suffix(".onnx"))
    model = onnx.load(path.with_suffix(".onnx"), load_external_data=False)
    onnx.checker.check_model(path.with_suffix(".onnx"), full_check=True, check_custom_domain=True)
    ours = [n.op_type for n in model.graph.node if n.domain == DOMAIN]
    layer = ["norm_linear", "rope_attention", "linear_add", "norm_linear", "linear_add"]
    assert ours == ["rope_table", *layer, *layer, "norm_linear"]
    assert [o.name for o in model.graph.output] == ["logits", "kv_pool_out"]


# ---- choosing -------------------------------------------------------------------------------


def linear(rows: str = "T", n: int = 6144, k: int = 4096) -> OpSignature:
    def act(width: int) -> TensorType:
        return TensorType("bfloat16", (rows, width))

    return signature("linear", (act(k),), (act(n),), (TensorType("bfloat16", (n, k)),))


H200 = cuda_target("cuda:h200")
BIG = Limits(max_batch_size=64, max_num_tokens=2048, max_seq_len=4096, tokens_per_page=32)


def test_defaults_change_with_the_rows() -> None:
    (row,) = choose_cuda({"x": linear()}, BIG, H200, batch_invariant=False).mixed.values()
    assert [c.rows for c in row] == sorted({c.rows for c in row})
    assert row[-1].rows == 2048
    assert len({c.tactic.name for c in row}) > 1  # few rows and many want different kernels
    assert all(not c.tactic.max_rows or c.rows <= c.tactic.max_rows for c in row)


def test_batch_invariance_takes_one_invariant_tactic_for_all_rows() -> None:
    signatures = {
        "linear": linear(),
        "head": linear("R"),
        "add": signature("add", (TensorType("float32", ("T", 64)),) * 2, (TensorType("float32", ("T", 64)),)),
    }
    chosen = choose_cuda(signatures, BIG, H200, batch_invariant=True)
    assert chosen.decode == {}
    for row in chosen.mixed.values():
        assert len({c.tactic.name for c in row}) == 1
        assert all(c.tactic.batch_invariant for c in row)
        # One configuration as well: a row's sums do not depend on the bucket.
        assert len({launch.kernel.key() for c in row for launch in c.launches}) == len(row[0].launches)
    assert not all(t.batch_invariant for t in cuda_tactics("linear"))


def test_what_no_tactic_can_run_is_listed_with_reasons() -> None:
    odd = signature("rope", (TensorType("float32", ("T", 2, 24)), TensorType("float32", ("T", 24))),
                    (TensorType("float32", ("T", 2, 24)),), (), {"interleaved": False})  # fmt: skip
    with pytest.raises(UnsupportedError) as error:
        choose_cuda(
            {"fine": linear(), "odd": odd, "half": replace(odd, op="add")}, BIG, H200, batch_invariant=False
        )
    assert "no multiples of 16" in error.value.message
    assert "odd:" in error.value.message
    assert "half:" in error.value.message
    assert "fine" not in error.value.message


@pytest.mark.parametrize("most", [1, 2, 5, 64, 100])
def test_buckets(most: int) -> None:
    sizes = buckets(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert all(b <= 2 * a for a, b in pairwise(sizes))


def test_targets() -> None:
    assert cuda_target("cuda:h200") == CudaTarget(90, 132, 227 << 10)
    assert cuda_target("cuda:sm_89").sm_count == min(s.sm_count for s in SKUS.values() if s.sm == 89)
    with pytest.raises(UnsupportedError, match=r"'cuda:v100' is unknown.*a100.*sm_120"):
        cuda_target("cuda:v100")


def test_what_only_a_gpu_can_check_is_no_default() -> None:
    signatures = {"x": linear(), "head": linear("R")}
    assert any(not t.interpretable and t.unsupported(linear(), H200) is None for t in cuda_tactics("linear"))
    chosen = choose_cuda(signatures, BIG, H200, batch_invariant=False)
    assert all(c.tactic.interpretable for c in chosen.all())
