"""TensorRT segments against our kernels: pack, time, finish, run, for a tiny Llama on a made-up L4.

Kernels are names, the builder's segments are ONNX models, and times are those of a script: nothing here is
measured. That a wrong segment is seen is shown with real numbers in tactic_timer/test_interpreted_region.py.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parents[3] / "compiler"))

from fake_cuda import FakeCuda, Launched
from fake_kernels import compile_nothing
from fake_tensorrt import SYMBOL, FakeTensorRt
from next_token import NextToken

from tapeout.cli.main import cli
from tapeout.compiler import cuda_plan, time_into_cache
from tapeout.compiler.front_end import FrontEnd, Lowered
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.tactics import gpu_contests, gpu_decide, gpu_pack
from tapeout.compiler.tensorrt import choice, competition
from tapeout.compiler.tensorrt import segments as builder_side
from tapeout.compiler.tensorrt.builder import Built
from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.engine import Engine, open_engine
from tapeout.runtime.engine.launches import LaunchTable, RegionRange
from tapeout.runtime.executors import load_executor
from tapeout.runtime.executors.cuda import CudaExecutor
from tapeout.runtime.step import StepInputs
from tapeout.runtime.tactic_timer.pack_file import read_pack
from tapeout.runtime.tactic_timer.session import time_pack
from tapeout.runtime.tensorrt import segments as runtime_side
from tapeout.runtime.tensorrt.package import KINDS, RTX, Package

Install = Callable[[FakeCuda], FakeCuda]
Step = Callable[..., StepInputs]
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[dev]'")

VERSION = "1.7.1.116"
FLAGS = ["--target", "cuda:l4", "--dtype", "float32", "--max-batch-size", "2", "--max-num-tokens", "8",
         "--max-seq-len", "64", "--tokens-per-page", "16"]  # fmt: skip
#: Fast with 1 row, slow with 2; wrong with 4; with 8 the first region's ends the process, the last one's
#: breaks the context.
SCRIPT = {
    "version": VERSION,
    "us": {"1": 90, "2": 9000, "4": 80, "8": 70},
    "wrong": [4],
    "crash": [8],
    "fault": [8],
}


@pytest.fixture(scope="module", autouse=True)
def stand_ins() -> Iterator[None]:
    """No compiler, no builder, one trace, and two contenders for every op."""
    lower, contenders = FrontEnd.lower, gpu_contests._contenders
    made: dict[str, Lowered] = {}

    def lower_once(front_end: FrontEnd, options: BuildOptions, *rest: Any) -> Lowered:
        if options.target not in made:
            made[options.target] = lower(front_end, options, *rest)
        return made[options.target]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrontEnd, "lower", lower_once)
        patch.setattr(gpu_contests, "_contenders", lambda *given: contenders(*given)[:2])
        for module in (cuda_plan, gpu_pack):
            patch.setattr(module, "compile_all", compile_nothing)
        for module in (gpu_decide, choice):
            patch.setattr(module, "local_gpu", lambda target, sm: None)
        patch.setattr(builder_side, "FEW_ROWS", 2)
        for module in (builder_side, choice, competition):
            patch.setattr(module, "installed_version", {RTX: VERSION}.get)
        patch.setattr(
            builder_side, "_build",
            lambda models, *rest: {n: Built(model, ("kgen made_up",), 0.0) for n, model in models.items()},
        )  # fmt: skip
        yield


@dataclass(frozen=True)
class Place:
    """A checkpoint, its pack, and the timing cache of that."""

    folder: Path
    told: str = ""

    @property
    def cache(self) -> Path:
        return self.folder / "times.json"

    def build(self, *flags: str | Path, code: int = 0) -> Result:
        command = ["build", str(self.folder / "model"), *FLAGS, *map(str, flags)]
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == code, done.output
        return done

    def engine(self, name: str, *flags: str) -> Path:
        self.build("-o", self.folder / name, "--timing-cache", self.cache, *flags)
        return self.folder / name


def time_it(
    place: Place, cache: Path, script: dict[str, Any], command: tuple[str, ...], pack: str | Path = "m.pack"
) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEGMENT_GPU", json.dumps(script))
        patch.setattr(time_into_cache, "time_pack", functools.partial(time_pack, worker=command))
        done = CliRunner().invoke(cli, ["time", str(place.folder / pack), "-o", str(cache)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def command() -> Iterator[tuple[str, ...]]:
    tests = Path(__file__).parents[3]
    fakes = [tests / folder for folder in ("runtime/tactic_timer", "runtime/executors", "compiler")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*map(str, fakes), *sys.path])
        yield (sys.executable, "-W", "ignore", str(fakes[0] / "segment_gpu.py"))


@pytest.fixture(scope="module")
def packed(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("competition"))
    models.make_tiny("llama", place.folder / "model")
    told = place.build("--pack", place.folder / "m.pack").output
    assert "and 3 TensorRT segments" in told
    return place


@pytest.fixture(scope="module")
def timed(packed: Place, command: tuple[str, ...]) -> Place:
    return Place(packed.folder, time_it(packed, packed.cache, SCRIPT, command))


@pytest.fixture(scope="module")
def finished(timed: Place) -> Path:
    return timed.engine("auto.engine")


def table_of(engine: Engine) -> LaunchTable:
    assert engine.launches is not None
    return engine.launches


def test_a_pack_holds_the_distinct_regions(packed: Place) -> None:
    file = read_pack(packed.folder / "m.pack")
    pack = file.pack
    assert len(pack.segments) == len(pack.regions) == len(file.plans) == 3
    kinds = [[(c.kind, c.rows, c.logit_rows) for c in pack.region_cases if c.region == n] for n in range(3)]
    mixed = [("mixed", rows, min(rows, 2)) for rows in (1, 2, 4, 8)]
    # Only the last one's logits make a step that only decodes another one.
    assert kinds == [mixed, mixed, [*mixed, ("decode", 1, 1), ("decode", 2, 2)]]
    for case in pack.region_cases:
        ops = [pack.entries[entry].op for entry in case.ops]
        assert ops == [record.op for record in pack.regions[case.region].records]


def test_what_was_timed_and_why_others_were_not(timed: Place) -> None:
    assert "tensorrt refused at 4 rows: output x9: 3 of 8 elements differ" in timed.told
    told = " ".join(timed.told.split())
    assert "the process ended with SIGSEGV while checking region 0" in told
    assert "CUDA_ERROR_ILLEGAL_ADDRESS while checking region 2" in told
    assert "2 restarts" in timed.told
    assert len(list((timed.folder / "times.json.segments").glob("*.plan"))) == 3


def test_a_segment_runs_where_it_was_faster(finished: Path) -> None:
    """With 1 row; with 8 where it ran. Never where it was slower or wrong."""
    with open_engine(finished) as engine:
        first, middle, last = table_of(engine).regions
        few, many = 0, 1  # profiles
        assert first.ranges == (RegionRange(1, few), RegionRange(8, -1))
        assert middle.ranges == (RegionRange(1, few), RegionRange(4, -1), RegionRange(8, many))
        assert last.ranges == first.ranges
        assert (first.decode_ranges, middle.decode_ranges) == ((), ())
        assert last.decode_ranges == (RegionRange(1, few), RegionRange(2, -1))
        assert engine.manifest.timed
        assert "timed by tapeout time" in engine.manifest.parity["segments"]
        assert engine.manifest.versions["tensorrt_rtx"] == VERSION
        told = {(t.digest, t.kind, t.rows): t for t in engine.manifest.regions}
        assert len(told) == 14
        for time in told.values():
            won = time.rows == 1 or (time.rows == 8 and not time.reason)
            assert time.winner == ("tensorrt" if won else "native")
            if time.rows in (1, 2):
                assert time.segment_us == SCRIPT["us"][str(time.rows)]  # type: ignore[index]
                assert time.own_us is not None
                assert time.own_us % 200 == 0
                assert time.own_us >= 200 * len(time.ops)
            if time.rows == 4:
                assert (time.segment_us, time.reason) == (None, "output x9: 3 of 8 elements differ")
        engine.verify_all()
    report = json.loads(Path(f"{finished}.report.json").read_text())
    assert len(report["regions"]) == 14
    assert report["timed"]


def test_inspect_tells_who_won(finished: Path) -> None:
    told = CliRunner().invoke(cli, ["inspect", str(finished)])
    assert told.exit_code == 0, told.output
    assert "regions (µs by rows, * runs there; ours: our kernels in a row)" in told.output
    (line, *_) = [line for line in told.output.splitlines() if line.split()[:1] == ["tensorrt"]]
    assert line.split()[1:3] == ["90.0*", "9000"]
    assert "tensorrt refused at 4 rows" in told.output


def test_the_same_cache_gives_the_same_bytes(finished: Path, timed: Place) -> None:
    again = timed.engine("again.engine")
    assert again.read_bytes() == finished.read_bytes()


def test_each_bucket_is_its_own_launches(
    finished: Path, install: Install, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments in the graphs of 1 and 8 rows, our kernels in that of 2, of one engine."""
    cuda = install(FakeCuda(sm=89, name="NVIDIA L4"))
    fake = FakeTensorRt(cuda)
    monkeypatch.setattr(runtime_side, "installed_version", {RTX: VERSION}.get)
    monkeypatch.setattr(runtime_side, "load", lambda name: Package(KINDS[name], VERSION, fake.module))
    with open_engine(finished) as engine:
        executor = load_executor(engine, num_pages=8)
        assert isinstance(executor, CudaExecutor)
        next_token = NextToken(executor, engine)

        def on_launch(launched: Launched) -> None:
            if launched.symbol != SYMBOL:
                next_token(launched)

        cuda.on_launch = on_launch
        for slot in range(2):
            executor.admit(slot, SamplingParams(temperature=0.0, max_tokens=8), np.zeros(0, np.int32))

        def launched_by(*rows: tuple[int, list[int], int, list[int]]) -> list[str]:
            cuda.launched.clear()
            ids = executor.submit(step(*rows)).result().token_ids
            assert [row[1][-1] + 1 for row in rows] == list(ids)
            return [x.symbol for x in cuda.launched]

        many = launched_by((0, [1, 2, 3, 4, 5], 0, [0]), (1, [1], 0, [1]))  # a bucket of 8
        two = launched_by((0, [6], 5, [0]), (1, [2], 1, [1]))
        one = launched_by((0, [7], 6, [0]))
        assert [symbols.count(SYMBOL) for symbols in (many, two, one)] == [1, 0, 3]
        names = {"norm_linear", "linear_add"}
        ours = {key.partition("(")[0] for key in table_of(engine).ranges}
        assert names <= ours  # what a segment runs in one bucket our kernels run in another
        assert len(two) > len(one)
        assert [call.profile for call in fake.calls] == [1, 0, 0, 0]
        executor.close()
    assert not any(cuda.open.values())


def test_named_segments_run_everywhere(timed: Place) -> None:
    """`--tactics tensorrt` takes all, also where they lost, and says what was measured."""
    path = timed.engine("tensorrt.engine", "--tactics", "tensorrt")
    with open_engine(path) as engine:
        table = table_of(engine)
        assert all(region.always for region in table.regions)
        assert {key.partition("(")[0] for key in table.ranges} == {"rope_attention"}
        assert {time.winner for time in engine.manifest.regions} == {"tensorrt"}
        assert {t.segment_us for t in engine.manifest.regions if t.rows == 2} == {9000}
        assert not engine.manifest.timed  # with 4 rows they were wrong
    done = timed.build(
        "-o", timed.folder / "no.engine", "--timing-cache", timed.cache, "--tactics", "tensorrt",
        "--require-timed", code=2,
    )  # fmt: skip
    assert "require_timed: not all TensorRT segments have times for cuda:" in done.output
    assert f"timing cache {timed.cache} lacks some" in done.output
    assert not (timed.folder / "no.engine").exists()


def test_native_knows_nothing_of_it(timed: Place, finished: Path) -> None:
    path = timed.engine("native.engine", "--tactics", "native")
    with open_engine(path) as engine:
        assert (table_of(engine).regions, table_of(engine).segments, engine.segment_names) == ((), (), ())
        assert "regions" not in engine.manifest.to_json()
        assert engine.manifest.timed


def test_without_times_of_regions_our_kernels_run(timed: Place, tmp_path: Path) -> None:
    """All else is timed. The engine has the bytes of one that was never offered a segment."""
    cache = json.loads(timed.cache.read_text())
    cache["entries"] = {key: entry for key, entry in cache["entries"].items() if "region" not in entry}
    (tmp_path / "times.json").write_text(json.dumps(cache))
    timed.build("-o", tmp_path / "a.engine", "--timing-cache", tmp_path / "times.json")
    with open_engine(tmp_path / "a.engine") as engine:
        assert (table_of(engine).regions, engine.segment_names) == ((), ())
        assert engine.manifest.timed
        assert engine.manifest.regions == ()


def test_a_segment_that_is_not_at_hand_is_not_taken(timed: Place, tmp_path: Path) -> None:
    """Its times belong to its bytes; nothing is built in its place."""
    shutil.copy(timed.cache, tmp_path / "times.json")
    told = timed.build("-o", tmp_path / "a.engine", "--timing-cache", tmp_path / "times.json").output
    told = " ".join(told.split())
    assert "segments of 3 distinct regions were timed to be faster and are not taken" in told
    with open_engine(tmp_path / "a.engine") as engine:
        assert table_of(engine).regions == ()
        assert {time.winner for time in engine.manifest.regions} == {"native"}


def test_two_gpus_of_one_capability_in_one_cache(
    packed: Place, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two packs, and TensorRT-RTX built other bytes for the second: each GPU's engine runs those it timed."""
    import onnx

    def other_bytes(models: dict[str, bytes], *rest: Any) -> dict[str, Built]:
        made = {}
        for name, model in ((name, onnx.load_from_string(data)) for name, data in models.items()):
            model.doc_string = "built again"
            made[name] = Built(model.SerializeToString(), ("kgen made_up",), 0.0)
        return made

    l40s, cache = ("--target", "cuda:l40s"), tmp_path / "times.json"
    monkeypatch.setattr(builder_side, "_build", other_bytes)
    packed.build("--pack", tmp_path / "l40s.pack", *l40s)
    time_it(packed, cache, sound := {**SCRIPT, "wrong": [], "crash": [], "fault": []}, command)
    time_it(packed, cache, {**sound, "gpu": "NVIDIA L40S"}, command, tmp_path / "l40s.pack")
    seen = []
    for name, flags, pack in (("l4", (), packed.folder / "m.pack"), ("l40s", l40s, tmp_path / "l40s.pack")):
        told = packed.build("-o", tmp_path / f"{name}.engine", "--timing-cache", cache, *flags).output
        assert "are not taken" not in told
        with open_engine(tmp_path / f"{name}.engine") as engine:
            assert engine.manifest.timed
            seen.append({segment.blob for segment in table_of(engine).segments})
        assert seen[-1] == {packed.segment.blob for packed in read_pack(pack).pack.segments}
    assert not seen[0] & seen[1]


@pytest.mark.parametrize(
    ("version", "have"), [(None, "which is not installed"), ("1.6.0", "this machine has 1.6.0")]
)
def test_a_machine_without_the_package(
    version: str | None, have: str, packed: Place, command: tuple[str, ...], tmp_path: Path
) -> None:
    """The reason is kept, our kernels win, and the next pack offers the segments again."""
    cache = tmp_path / "times.json"
    told = time_it(packed, cache, {**SCRIPT, "version": version}, command)
    assert f"the pack's segments are for TensorRT-RTX {VERSION}, {have}" in " ".join(told.split())
    assert "0 restarts" in told
    packed.build("-o", tmp_path / "a.engine", "--timing-cache", cache)
    with open_engine(tmp_path / "a.engine") as engine:
        assert table_of(engine).regions == ()
        assert engine.manifest.timed
        assert {time.winner for time in engine.manifest.regions} == {"native"}
        assert all(have in time.reason for time in engine.manifest.regions)
    packed.build("--pack", tmp_path / "again.pack", "--timing-cache", cache)
    assert len(read_pack(tmp_path / "again.pack").pack.region_cases) == 14


def test_what_the_cache_answers_is_not_packed_again(timed: Place, tmp_path: Path) -> None:
    timed.build("--pack", tmp_path / "again.pack", "--timing-cache", timed.cache)
    pack = read_pack(tmp_path / "again.pack").pack
    assert (pack.entries, pack.region_cases, pack.segments) == ((), (), ())


def test_a_native_pack_is_what_it_was(packed: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not a builder of segments is here; in the form that knows nothing of them."""
    packed.build("--pack", tmp_path / "with.pack", "--tactics", "native")
    monkeypatch.setattr(choice, "installed_version", lambda name: None)
    packed.build("--pack", tmp_path / "without.pack", "--tactics", "native")
    data = (tmp_path / "with.pack").read_bytes()
    assert data == (tmp_path / "without.pack").read_bytes()
    assert b'"pack_version":"3"' in data
    assert b'"segments"' not in data


def test_a_machine_without_a_builder(packed: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` packs our kernels and says why no more; `tensorrt` is refused."""
    monkeypatch.setattr(choice, "installed_version", lambda name: None)
    told = packed.build("--pack", tmp_path / "a.pack").output
    assert "no TensorRT segments: TensorRT segments for cuda:l4: TensorRT-RTX is not installed" in told
    assert read_pack(tmp_path / "a.pack").pack.regions == ()
    refused = packed.build("--pack", tmp_path / "b.pack", "--tactics", "tensorrt", code=5)
    assert "TensorRT-RTX is not installed" in refused.output
    assert not (tmp_path / "b.pack").exists()


def test_a_builder_that_fails_costs_its_segments(
    packed: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> dict[str, Built]:
        raise TapeoutError("TensorRT-RTX did not build a segment for sm_89: no such layer", hint="none")

    monkeypatch.setattr(builder_side, "_build", fail)
    told = packed.build("--pack", tmp_path / "a.pack").output
    assert "no TensorRT segments: TensorRT-RTX did not build a segment for sm_89" in told
    packed.build("--pack", tmp_path / "b.pack", "--tactics", "tensorrt", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pack"]
