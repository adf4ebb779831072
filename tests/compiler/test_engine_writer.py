"""Writing engines: complete or absent, the same bytes every time, refused early when it cannot work."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapeout.compiler.engine_writer as writer
import tapeout.compiler.pending_file as pending_file
from tapeout.compiler.engine_writer import check_output, write_engine
from tapeout.compiler.shared_weights import SharedWeights
from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.runtime.engine import (
    FORMAT_VERSION,
    Buffer,
    KvCacheLayout,
    Limits,
    Manifest,
    ModelFacts,
    Program,
    Record,
    TacticRange,
    View,
    open_engine,
)

SIGNATURE = OpSignature(
    "linear",
    (TensorType("float32", ("T", 4)),),
    (TensorType("float32", (3, 4)),),
    (TensorType("float32", ("T", 3)),),
)
X = View("x", "float32", ("T", 4), (4, 1))
Y = View("y", "float32", ("T", 3), (3, 1))
PROGRAM = Program(
    256,
    (Buffer("x", "float32", ("T", 4), 0, 128), Buffer("y", "float32", ("T", 3), 128, 96)),
    (Record("linear", (X,), ("w",), (Y,), {}, SIGNATURE.key()),),
    View("y", "float32", ("R", 3), (3, 1)),
    {SIGNATURE.key(): SIGNATURE},
    {SIGNATURE.key(): (TacticRange(8, "aten"),)},
)
MANIFEST = Manifest(
    format_version=FORMAT_VERSION,
    target="cpu:x86_64_v3",
    model=ModelFacts("A", "a", "float32", "none", 3, 64, "hf:0"),
    limits=Limits(2, 8, 64, 4),
    kv_cache=KvCacheLayout(1, 1, 4, "float32"),
    tokenizer=None,
    generation={},
    options={},
    versions={},
    passes={},
    parity={"verdict": "skipped"},
    timed=False,
)
ARRAYS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "v": np.ones(5, np.float32)}


def read(name: str) -> np.ndarray:
    return ARRAYS[name]


def write(path: Path, **changes: Any) -> writer.WriteResult:
    arguments: dict[str, Any] = {
        "manifest": MANIFEST,
        "program": PROGRAM,
        "weights": {n: WeightRef.of(TensorInfo(n, a.dtype.name, a.shape)) for n, a in ARRAYS.items()},
        "read": read,
        "kernels": {"native.so": b"code"},
        "texts": {"b": b"2", "a": b"1"},
        "source_digest": "source",
    }
    return write_engine(path, **(arguments | changes))


def listing(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_result_names_files_and_sizes(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    result = write(tmp_path / "e", progress=lambda now, total: done.append((now, total)))
    size = (tmp_path / "e").stat().st_size
    assert result.paths == (tmp_path / "e",)
    assert result.sizes["total"] == size
    assert [n for n, _ in done] == sorted(n for n, _ in done)
    assert {t for _, t in done} == {size}


@pytest.mark.parametrize("shared", [False, True])
def test_two_writes_are_identical(tmp_path: Path, shared: bool) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        # Blobs are sorted; weights keep the program's order.
        write(
            tmp_path / name / f"{name}.engine",
            shared=shared,
            texts=dict(sorted({"b": b"2", "a": b"1"}.items())),
        )
    files = [sorted((tmp_path / n).iterdir()) for n in ("a", "b")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "e")
    finally:
        os.umask(before)
    assert (tmp_path / "e").stat().st_mode & 0o777 == 0o640


def test_peak_memory_is_one_weight(tmp_path: Path) -> None:
    size = 16 << 20
    infos = [TensorInfo(f"v{i}", "float32", (4096, size // 4 // 4096)) for i in range(4)]
    weights = {"w": WeightRef.of(TensorInfo("w", "float32", (3, 4)))}
    weights |= {i.name: WeightRef.of(i).cast("bfloat16") for i in infos}
    sources = {i.name: i.shape for i in infos}
    tracemalloc.start()
    write(
        tmp_path / "e",
        weights=weights,
        read=lambda n: np.zeros(sources[n], np.float32) if n != "w" else read(n),
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * size + (14 << 20)  # one source, its cast, one block; never two weights


class TestShared:
    def test_an_existing_weight_file_is_kept(self, tmp_path: Path) -> None:
        first = write(tmp_path / "a", shared=True)
        stamp = first.paths[1].stat().st_mtime_ns
        second = write(tmp_path / "b", shared=True, read=lambda _: pytest.fail("weights were read"))
        assert (first.shared_reused, second.shared_reused) == (False, True)
        assert second.paths[1].stat().st_mtime_ns == stamp
        open_engine(tmp_path / "b").close()

    def test_a_damaged_weight_file_is_written_again(self, tmp_path: Path) -> None:
        first = write(tmp_path / "a", shared=True)
        good = first.paths[1].read_bytes()
        for damage in (good[:-1], good[:4096] + b"?" + good[4097:], b""):
            first.paths[1].write_bytes(damage)
            assert not write(tmp_path / "b", shared=True).shared_reused
            assert first.paths[1].read_bytes() == good

    def test_other_sources_make_another_file(self, tmp_path: Path) -> None:
        names = {write(tmp_path / s, shared=True, source_digest=s).paths[1] for s in ("a", "b")}
        assert len(names) == 2


class TestStaged:
    """An engine is whole and can be opened before it gets its name."""

    def stage(self, path: Path, **changes: Any) -> writer.StagedEngine:
        weights = {n: WeightRef.of(TensorInfo(n, a.dtype.name, a.shape)) for n, a in ARRAYS.items()}
        if changes.pop("shared", False):
            changes["shared"] = SharedWeights(path, weights, read, lambda: "s")
        return writer.stage_engine(
            path, MANIFEST, PROGRAM, weights, read, {}, {}, source_digest="s", **changes
        )

    @pytest.mark.parametrize("shared", [False, True])
    def test_commit_with_a_verdict(self, tmp_path: Path, shared: bool) -> None:
        verdict = {"verdict": "passed", "prompts": 4}
        with self.stage(tmp_path / "e", shared=shared) as staged:
            assert not (tmp_path / "e").exists()
            with open_engine(staged.path) as engine:
                assert engine.manifest.parity == MANIFEST.parity
            staged.commit(replace(MANIFEST, parity=verdict))
        with open_engine(tmp_path / "e") as engine:
            engine.verify_all()
            assert engine.manifest.parity == verdict
        assert len(listing(tmp_path)) == 1 + shared

    @pytest.mark.parametrize("shared", [False, True])
    def test_without_commit_no_engine_stays(self, tmp_path: Path, shared: bool) -> None:
        with self.stage(tmp_path / "e", shared=shared) as staged:
            assert len(listing(tmp_path)) == 1 + shared
        # Whole, and named by its digest: another build may have begun to use the weight file.
        assert listing(tmp_path) == [p.name for p in staged.result.paths[1:]]
        assert self.stage(tmp_path / "f", shared=shared).result.shared_reused == shared

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_an_interrupt_while_names_are_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool, moment: str
    ) -> None:
        real = Path.replace

        def interrupted(source: Path, target: Path) -> Path:
            if moment == "before":
                signal.raise_signal(signal.SIGINT)
            result = real(source, target)
            signal.raise_signal(signal.SIGINT)
            return result

        with self.stage(tmp_path / "e", shared=shared) as staged:
            monkeypatch.setattr(Path, "replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                staged.commit(MANIFEST, (tmp_path / "e.report.json", "{}"))
        # Engine, report and weights are there together, and nothing else.
        assert len(listing(tmp_path)) == 2 + shared
        assert (tmp_path / "e.report.json").read_text() == "{}"
        with open_engine(tmp_path / "e") as engine:
            engine.verify_all()

    def test_without_a_report_there_is_no_engine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for error in (KeyboardInterrupt(), OSError(errno.EIO, "bad disk")):

            def failing(path: Path, error: BaseException = error) -> Any:
                raise error

            with self.stage(tmp_path / "e") as staged:
                monkeypatch.setattr(writer, "temporary_file", failing)
                with pytest.raises((KeyboardInterrupt, TapeoutError)):
                    staged.commit(MANIFEST, (tmp_path / "e.report.json", "{}"))
            monkeypatch.undo()
            assert listing(tmp_path) == []

    def test_a_link_to_an_engine_stays_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "link").symlink_to("d/e")
        for _ in range(2):
            with self.stage(tmp_path / "link") as staged:
                staged.commit(MANIFEST)
        assert (tmp_path / "link").is_symlink()
        assert listing(tmp_path / "d") == ["e"]
        with pytest.raises(UsageError, match="its weights would stand there"):
            self.stage(tmp_path / "link", shared=True)

    def test_leftovers_of_killed_builds_go(self, tmp_path: Path) -> None:
        for name in (".0123456789abcdef.weights.safetensors.aa.tmp", ".e.aa.tmp"):
            (tmp_path / name).touch()
        with self.stage(tmp_path / "e", shared=True) as staged:
            staged.commit(MANIFEST)
        assert listing(tmp_path) == sorted(p.name for p in staged.result.paths)

    def test_a_weight_file_of_another_engine_stays(self, tmp_path: Path) -> None:
        with self.stage(tmp_path / "a", shared=True) as staged:
            kept = staged.commit(MANIFEST).paths
        with self.stage(tmp_path / "b", shared=True):
            pass
        assert listing(tmp_path) == sorted(p.name for p in kept)

    def test_a_verdict_that_does_not_fit(self, tmp_path: Path) -> None:
        with (
            self.stage(tmp_path / "e") as staged,
            pytest.raises(TapeoutError, match=r"header of .* are reserved"),
        ):
            staged.commit(replace(MANIFEST, parity={"verdict": "x" * 5000}))
        assert listing(tmp_path) == []


class TestFailure:
    """Nothing appears under the final name and nothing is left behind."""

    def failing_read(self, error: BaseException) -> Callable[[str], np.ndarray]:
        def failing(name: str) -> np.ndarray:
            if name == "v":
                raise error
            return read(name)

        return failing

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (KeyboardInterrupt(), KeyboardInterrupt),
            (ValueError("odd"), ValueError),
            (OSError(errno.EIO, "bad disk"), TapeoutError),
        ],
    )
    @pytest.mark.parametrize("shared", [False, True])
    def test_while_reading(
        self, tmp_path: Path, error: BaseException, expected: type[BaseException], shared: bool
    ) -> None:
        with pytest.raises(expected):
            write(tmp_path / "e", read=self.failing_read(error), shared=shared)
        assert listing(tmp_path) == []

    def test_an_older_engine_survives(self, tmp_path: Path) -> None:
        write(tmp_path / "e")
        before = (tmp_path / "e").read_bytes()
        with pytest.raises(ValueError, match="odd"):
            write(tmp_path / "e", read=self.failing_read(ValueError("odd")))
        assert (tmp_path / "e").read_bytes() == before

    def test_disk_full_before(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pending_file.shutil, "disk_usage", lambda _: _Usage(10))
        with pytest.raises(
            TapeoutError, match=r"no space left for .*e: it takes [\d,]+ bytes, 10 are free"
        ) as error:
            write(tmp_path / "e")
        assert (error.value.exit_code, listing(tmp_path)) == (1, [])

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
    def test_disk_full_while_writing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.fdopen

        def full(fd: int, mode: str) -> Any:
            os.dup2(os.open("/dev/full", os.O_WRONLY), fd)
            return real(fd, mode)

        monkeypatch.setattr(writer, "check_output", Path)
        monkeypatch.setattr(os, "fdopen", full)
        with pytest.raises(TapeoutError, match="no space left for") as error:
            write(tmp_path / "e")
        assert "space" in (error.value.hint or "")
        assert listing(tmp_path) == []

    def test_an_unsound_program_is_refused(self, tmp_path: Path) -> None:
        y = replace(PROGRAM.buffers[1], offset_bytes=64)
        program = replace(PROGRAM, arena_bytes=150, buffers=(PROGRAM.buffers[0], y))
        with pytest.raises(
            TapeoutError, match=r"(?s)buffer y.*outside the arena.*x and y share bytes.*weight w does not"
        ):
            write(tmp_path / "e", program=program, weights={})
        assert listing(tmp_path) == []


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_killed_writer_leaves_only_a_temporary_file(tmp_path: Path) -> None:
    code = f"""
        import importlib.util, pathlib, time
        spec = importlib.util.spec_from_file_location("t", {str(Path(__file__))!r})
        t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)
        def read(name):
            if name == "v":
                print("writing", flush=True); time.sleep(60)
            return t.read(name)
        t.write(pathlib.Path({str(tmp_path / "e")!r}), read=read)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    # A build at work keeps its file: another one of the same output does not take it away.
    write(tmp_path / "e")
    assert len(listing(tmp_path)) == 2
    (tmp_path / "e").unlink()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "e").exists()
    assert len(listing(tmp_path)) == 1
    write(tmp_path / "e")
    assert listing(tmp_path) == ["e"]


class TestCheckOutput:
    def test_a_good_path_leaves_nothing_behind(self, tmp_path: Path) -> None:
        assert check_output(tmp_path / "e") == tmp_path / "e"
        assert listing(tmp_path) == []

    def test_a_directory_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is a directory"):
            check_output(tmp_path)

    def test_a_missing_directory_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="does not exist") as error:
            check_output(tmp_path / "none" / "e")
        assert "mkdir -p" in (error.value.hint or "")

    @pytest.mark.skipif(
        sys.platform != "linux", reason="needs /proc, where nobody can create files, not even root"
    )
    def test_a_place_that_takes_no_file_is_refused(self) -> None:
        with pytest.raises(UsageError, match="cannot be written"):
            check_output("/proc/e")
