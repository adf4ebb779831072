"""cuBLASLt as a provider of tactics: who competes, what is cached, what an engine holds, what is refused.

Nothing is compiled and no library is loaded: the scripted worker tells times and an algorithm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_kernels import compile_nothing

from tapeout.cli.main import cli
from tapeout.compiler import cuda_plan, time_into_cache
from tapeout.compiler.cuda_plan import choose_cuda
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.tactics import gpu_decide, gpu_pack
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings
from tapeout.compiler.tactics.gpu_contests import contests
from tapeout.compiler.tactics.gpu_select import choose_timed, unanswered
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.case import cases
from tapeout.plugins.cuda import CUBLASLT, NATIVE, CudaTarget, LaunchSpec, MatmulAlgorithm, MatmulSpec
from tapeout.plugins.errors import UsageError
from tapeout.plugins.linear.cublaslt import WORKSPACE_BYTES, CublasLt
from tapeout.runtime.engine import open_engine
from tapeout.runtime.engine.launches import LaunchTable, Matmul
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.executors.cuda import driver
from tapeout.runtime.tactic_timer.pack_file import read_pack
from tapeout.runtime.tactic_timer.session import time_pack

FLAGS = ["--target", "cuda:h200", "--max-batch-size", "2", "--max-num-tokens", "4", "--max-seq-len", "64"]
WORKER = (sys.executable, str(Path(__file__).parents[1] / "runtime/tactic_timer/scripted_worker.py"))
TARGET, LIMITS = CudaTarget(90, 132, 232448, 16), Limits(2, 2, 64, 16)
GPU = Gpu("NVIDIA H200", 90, 132, 140)
EVERYBODY = frozenset({NATIVE, CUBLASLT})


def algorithm(version: int = 130100, workspace_bytes: int = 4096) -> MatmulAlgorithm:
    return MatmulAlgorithm("ab" * 64, version, workspace_bytes)


def types_of(op: str, label: str) -> Any:
    return next(c.signature for c in cases(op) if label in c.label)


class TestTactic:
    TACTIC = CublasLt("linear")

    @pytest.mark.parametrize(
        ("op", "label", "reason"),
        [
            ("linear", "bfloat16 96x64 bias", None),
            ("linear", "float32 96x64", "float32 products are left to our own kernels"),
            ("linear", "bfloat16 61x77", "61 outputs of depth 77 are no multiples of 8"),
            ("norm_linear", "bfloat16 64x320 silu", None),
            ("linear_add", "bfloat16 96x64 bias", None),
        ],
    )
    def test_what_it_runs(self, op: str, label: str, reason: str | None) -> None:
        assert self.TACTIC.unsupported(types_of(op, label), TARGET) == reason

    def test_launches_around_the_product(self) -> None:
        """Where each part of a gated norm_linear lies in the workspace: they must not overlap."""
        types, rows = types_of("norm_linear", "bfloat16 64x320 silu"), 5
        norm, product, gate = CublasLt("norm_linear").launches(types, rows, TARGET)
        assert isinstance(norm, LaunchSpec)
        assert isinstance(product, MatmulSpec)
        assert isinstance(gate, LaunchSpec)
        assert (product.n, product.k, product.bias, product.addend) == (64, 320, False, False)
        x, _, _, out, row, *_, own = product.args
        assert (x.kind, x.value, out.kind, row.value, own.kind) == (
            "workspace",
            0,
            "workspace",
            64,
            "workspace",
        )
        assert out.value >= rows * 320 * 2
        assert own.value >= out.value + rows * 64 * 2
        assert own.value % 256 == out.value % 256 == 0
        size = CublasLt("norm_linear").workspace_bytes(types, rows, TARGET)
        assert size == own.value + WORKSPACE_BYTES
        assert [a.value for a in norm.args if a.kind == "workspace"] == [x.value]
        assert [a.value for a in gate.args if a.kind == "workspace"] == [out.value]

    def test_it_is_never_a_default(self) -> None:
        types = types_of("linear", "bfloat16 96x64")
        for invariant in (False, True):
            chosen = choose_cuda({"l": types}, LIMITS, TARGET, batch_invariant=invariant)
            assert all(c.tactic.provider == NATIVE for c in chosen.all())


class TestChoice:
    """The tactic of one linear from a cache."""

    TYPES = types_of("linear", "bfloat16 96x64")

    @pytest.fixture(autouse=True)
    def cache(self) -> None:
        self.timings = GpuTimings(TimingCache(None), GPU)
        self.decisions = contests({"l": self.TYPES}, LIMITS, TARGET, providers=EVERYBODY)
        self.defaults = choose_cuda({"l": self.TYPES}, LIMITS, TARGET, batch_invariant=False)

    def know(self, native_us: float | None, product: Outcome | None) -> None:
        for contest in self.decisions:
            for c in contest.contenders:
                outcome = product if c.provider == CUBLASLT else native_us and Outcome(native_us)
                if outcome:
                    place = (contest.key, contest.kind, contest.conditions, contest.rows)
                    self.timings.put(*place, c.kernel_hash, c.name, outcome)

    def choose(self, **how: Any) -> Any:
        how = {"batch_invariant": False, **how}
        return choose_timed(self.decisions, self.timings, self.defaults, **how)

    def providers(self, **how: Any) -> set[str]:
        return {c.tactic.provider for c in self.choose(**how).choices.all()}

    def test_only_linear_has_it(self) -> None:
        assert all(any(c.provider == CUBLASLT for c in d.contenders) for d in self.decisions)
        native = contests({"l": self.TYPES}, LIMITS, TARGET)
        assert all(c.provider == NATIVE for d in native for c in d.contenders)

    def test_the_faster_wins_with_its_algorithm(self) -> None:
        self.know(10.0, Outcome(3.0, None, algorithm()))
        timed = self.choose()
        assert timed.timed
        (chosen,) = timed.choices.mixed["l"]  # one range: all buckets have the same algorithm
        (product,) = chosen.launches
        assert (product.algorithm, product.workspace_bytes) == (algorithm(), 4096)
        assert chosen.workspace_bytes == 4096
        assert self.providers(batch_invariant=True) == {NATIVE}

    def test_the_slower_wins_where_it_is_preferred(self) -> None:
        self.know(1.0, Outcome(3.0, None, algorithm()))
        assert self.providers() == {NATIVE}
        assert self.providers(preferred=CUBLASLT) == {CUBLASLT}

    def test_a_wrong_one_is_out(self) -> None:
        self.know(10.0, Outcome(None, "output out: 3 of 8 elements differ"))
        assert self.providers() == self.providers(preferred=CUBLASLT) == {NATIVE}
        assert self.choose().timings[0].rejected["cublaslt"] == "output out: 3 of 8 elements differ"

    def test_what_is_not_known_is_no_default_and_no_reason_to_time_again(self) -> None:
        assert self.providers() == {NATIVE}
        self.know(10.0, None)
        assert self.choose().timed
        assert unanswered(self.decisions, self.timings).contests == ()
        assert unanswered(self.decisions, self.timings, CUBLASLT).contests == self.decisions

    def test_a_time_without_an_algorithm_is_unknown(self) -> None:
        self.know(10.0, Outcome(3.0))
        assert self.providers() == {NATIVE}

    def test_one_major_version_of_the_library(self) -> None:
        self.know(10.0, Outcome(3.0, None, algorithm(120900)))
        place = self.decisions[0]
        (newer,) = (c for c in place.contenders if c.provider == CUBLASLT)
        where = (place.key, place.kind, place.conditions, place.rows, newer.kernel_hash, newer.name)
        self.timings.put(*where, Outcome(5.0, None, algorithm(130000)))
        chosen = self.choose().choices.mixed["l"]
        assert [c.tactic.provider for c in chosen] == [CUBLASLT, NATIVE]


@pytest.mark.parametrize(
    "stored",
    [
        {"data": "ab" * 63, "version": 130100, "workspace_bytes": 0},
        {"data": "ab" * 64, "version": "13", "workspace_bytes": 0},
        {"data": "ab" * 64, "version": 130100},
        {"data": 10**127, "version": 130100, "workspace_bytes": 0},
    ],
)
def test_a_cache_with_a_broken_algorithm_is_none(tmp_path: Path, stored: dict[str, Any]) -> None:
    path, cache = tmp_path / "cache.json", TimingCache(tmp_path / "cache.json")
    place = ("s", "mixed", "", 1, "hash", "cublaslt")
    GpuTimings(cache, GPU).put(*place, Outcome(1.0, None, algorithm()))
    cache.save()
    assert GpuTimings(TimingCache.load(path), GPU).get(*place[:5]) == Outcome(1.0, None, algorithm())
    data = json.loads(path.read_text())
    (entry,) = data["entries"].values()
    entry["rows"]["1"]["hash"]["algorithm"] = stored
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="is not a timing cache"):
        TimingCache.load(path)


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="goes against batch_invariant"):
        BuildOptions(target="cuda:h200", tactics="cublaslt", batch_invariant=True)
    with pytest.raises(UsageError, match="'cublaslt' is for cuda targets, got target 'cpu'"):
        BuildOptions(target="cpu", tactics="cublaslt")
    with pytest.raises(
        UsageError, match="tactics: 'magma' is unknown, expected one of auto, native, cublaslt"
    ):
        BuildOptions(tactics="magma")


@pytest.fixture(scope="module", autouse=True)
def scripted(one_trace: None) -> Iterator[None]:
    def no_device(ordinal: int = 0) -> Any:
        raise ImportError("this machine has no GPU")

    with pytest.MonkeyPatch.context() as patch:
        for module in (gpu_pack, cuda_plan):
            patch.setattr(module, "compile_all", compile_nothing)
        for module in (time_into_cache, gpu_decide):
            patch.setattr(module, "time_pack", partial(time_pack, worker=WORKER))
        patch.setattr(driver, "open_device", no_device)
        yield


@pytest.fixture(scope="module")
def checkpoint(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = models.make_tiny("llama", tmp_path_factory.mktemp("llama") / "model")
    return path


@pytest.fixture(scope="module")
def pack(checkpoint: Path) -> Path:
    path = checkpoint.with_name("llama.pack")
    run("build", checkpoint, "--dtype", "bf16", "--pack", path, *FLAGS)
    return path


@pytest.fixture(scope="module")
def cache(pack: Path) -> Path:
    run("time", pack, "-o", pack.with_name("h200.json"))
    return pack.with_name("h200.json")


@pytest.fixture
def build(checkpoint: Path, tmp_path: Path) -> Callable[..., tuple[Result, Path]]:
    def invoke(*flags: object) -> tuple[Result, Path]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.engine"
        line = ["build", checkpoint, "--dtype", "bf16", "-o", path, *FLAGS, *flags]
        return CliRunner().invoke(cli, [*map(str, line)]), path

    return invoke


def run(*args: object) -> str:
    result = CliRunner().invoke(cli, [*map(str, args)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def table(path: Path) -> LaunchTable:
    with open_engine(path) as opened:
        assert opened.launches is not None
        assert opened.manifest.timed
        return opened.launches


def test_a_pack_leaves_algorithms_open(pack: Path) -> None:
    entries = read_pack(pack).pack.entries
    products = [
        item
        for e in entries
        for c in e.candidates
        for item in c.launches.launches
        if isinstance(item, Matmul)
    ]
    assert {e.op for e in entries if any(c.tactic == "cublaslt" for c in e.candidates)} == {
        "linear_add", "norm_linear",
    }  # fmt: skip
    assert {(p.algorithm, p.version, p.workspace_bytes) for p in products} == {("", 0, WORKSPACE_BYTES)}


def test_an_engine_holds_products(cache: Path, build: Callable[..., tuple[Result, Path]]) -> None:
    result, path = build("--timing-cache", cache)
    assert result.exit_code == 0, result.stderr
    held = table(path)
    assert held.matmul_versions() == (130100,)
    products = [item for item in held.everything() if isinstance(item, Matmul)]
    assert {p.workspace_bytes for p in products} == {1024}
    assert all(p.algorithm.startswith("9e7a") for p in products)
    assert LaunchTable.from_json(json.loads(json.dumps(held.to_json()))) == held
    assert "needs" in (shown := run("inspect", path))
    assert "cublasLt 13.1.0" in shown
    _, again = build("--timing-cache", cache)
    assert again.read_bytes() == path.read_bytes()


def test_native_alone(cache: Path, build: Callable[..., tuple[Result, Path]]) -> None:
    result, path = build("--timing-cache", cache, "--tactics", "native")
    assert result.exit_code == 0, result.stderr
    assert table(path).matmul_versions() == ()


def test_where_the_library_is_missing(
    pack: Path,
    tmp_path: Path,
    build: Callable[..., tuple[Result, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_CUBLASLT", "1")
    cache = tmp_path / "cache.json"
    told = run("time", pack, "-o", cache)
    places = sum(c.tactic == "cublaslt" for e in read_pack(pack).pack.entries for c in e.candidates)
    assert f"lost: cublaslt at {places} places: no libcublasLt\n" in told
    assert told.count("lost: cublaslt") == 1
    assert "cublaslt" not in cache.read_text()
    result, path = build("--timing-cache", cache)
    assert result.exit_code == 0, result.stderr
    assert table(path).matmul_versions() == ()
    result, path = build("--timing-cache", cache, "--tactics", "cublaslt")
    assert result.exit_code == 2
    assert "cublaslt was asked for" in result.stderr
    assert "pip install nvidia-cublas" in result.stderr
    assert not path.exists()


def test_packing_what_a_cache_lacks(
    checkpoint: Path, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_CUBLASLT", "1")
    cache, flags = tmp_path / "cache.json", ["--dtype", "bf16", *FLAGS]
    run("time", pack, "-o", cache)
    for tactics, ops in (("auto", set()), ("cublaslt", {"linear_add", "norm_linear"})):
        path = tmp_path / f"{tactics}.pack"
        run("build", checkpoint, *flags, "--pack", path, "--timing-cache", cache, "--tactics", tactics)
        assert {e.op for e in read_pack(path).pack.entries} == ops


def test_a_table_tells_launches_apart() -> None:
    """By their fields; a field too many names what was expected."""
    from tapeout.plugins.errors import EngineCorruptError

    launch = {"kernel": 0, "grid": [], "args": []}
    product = {
        "dtype": "bfloat16", "n": 8, "k": 8, "bias": False, "addend": False, "args": [],
        "workspace_bytes": 0, "algorithm": "", "version": 0,
    }  # fmt: skip
    row = {"max_rows": 1, "tactic": "", "workspace_bytes": 0, "launches": [launch, product]}
    empty = LaunchTable(90, (), {}, {}, (1,), (1,), 0, 0, (), (), ())
    data = {**empty.to_json(), "sample": [row], "sample_full": [row]}
    table = LaunchTable.from_json(data)
    assert [type(item).__name__ for item in table.everything()] == ["Launch", "Matmul"] * 2
    with pytest.raises(EngineCorruptError, match=r"launches.sample\[0\].launches\[0\]: keys do not match"):
        LaunchTable.from_json({**data, "sample": [{**row, "launches": [{**launch, "n": 8}]}]})
    assert replace(table, sample=(), sample_full=()) == empty
