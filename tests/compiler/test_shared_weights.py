"""The weight file beside an engine, written beside other work: complete, or gone, and never half of one."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fake_kernels import compile_nothing

from tapeout.compiler import build as build_module
from tapeout.compiler import cuda_plan
from tapeout.compiler.build import build
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.shared_weights import SharedWeights
from tapeout.model_defs import tensor_hashes
from tapeout.model_defs.hf_checkpoint import SafetensorsCheckpoint, open_checkpoint
from tapeout.model_defs.safetensors_file import FileTensor
from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import TapeoutError, UnsupportedError, UsageError

ARRAYS = {f"w{i}": np.full((64, 64), i, np.float32) for i in range(6)}
WEIGHTS = {n: WeightRef.of(TensorInfo(n, a.dtype.name, a.shape)) for n, a in ARRAYS.items()}
GPU: dict[str, Any] = {
    "target": "cuda:h200", "dtype": "float32", "weights": "shared",
    "max_batch_size": 2, "max_num_tokens": 4, "max_seq_len": 64, "tokens_per_page": 16,
}  # fmt: skip


class Reader:
    """Sources that can be had when `gate` is open; `asked` tells that the writer has come so far."""

    def __init__(self) -> None:
        self.gate, self.asked = threading.Event(), threading.Event()

    def __call__(self, name: str) -> np.ndarray:
        self.asked.set()
        assert self.gate.wait(30)
        return ARRAYS[name]


def test_the_file_is_the_one_written_when_asked_for(tmp_path: Path) -> None:
    for folder in ("plain", "ahead"):
        (tmp_path / folder).mkdir()
    plain = SharedWeights(tmp_path / "plain" / "e", WEIGHTS, ARRAYS.__getitem__, lambda: "s").result()
    reader, heard = Reader(), []
    weights = SharedWeights(tmp_path / "ahead" / "e", WEIGHTS, reader, lambda: "s")
    with weights.ahead():
        assert reader.asked.wait(30)  # before anybody wants the result
        threading.Timer(0.3, reader.gate.set).start()
        ahead = weights.result(lambda done, total: heard.append((done, total)))
    assert heard
    assert all(0 <= done <= total for done, total in heard)
    assert ahead.path.read_bytes() == plain.path.read_bytes()
    assert (ahead.digest, ahead.seal, ahead.file_bytes) == (plain.digest, plain.seal, plain.file_bytes)
    assert ahead.file_bytes == ahead.path.stat().st_size
    assert not ahead.reused


def test_work_that_fails_leaves_no_file(tmp_path: Path) -> None:
    reader = Reader()
    weights = SharedWeights(tmp_path / "e", WEIGHTS, reader, lambda: "s")

    def refused() -> None:
        with weights.ahead():
            assert reader.asked.wait(30)
            threading.Timer(0.3, reader.gate.set).start()
            raise KeyError("refused")

    with pytest.raises(KeyError, match="refused"):
        refused()
    assert list(tmp_path.iterdir()) == []


def test_a_complete_file_is_kept_and_found_again(tmp_path: Path) -> None:
    weights = SharedWeights(tmp_path / "e", WEIGHTS, ARRAYS.__getitem__, lambda: "s")
    with weights.ahead():
        path = weights.result().path
    again = SharedWeights(tmp_path / "f", WEIGHTS, lambda _: pytest.fail("weights were read"), lambda: "s")
    with again.ahead():
        found = again.result(lambda done, total: None)
    assert (found.path, found.reused) == (path, True)


def test_a_failure_is_told_where_the_file_is_asked_for(tmp_path: Path) -> None:
    def broken(name: str) -> np.ndarray:
        raise OSError("the disk is gone")

    weights = SharedWeights(tmp_path / "e", WEIGHTS, broken, lambda: "s")
    with weights.ahead(), pytest.raises(TapeoutError, match="sources of weight w0 cannot be read: the disk"):
        weights.result()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def checkpoint(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = models.make_tiny("llama", tmp_path_factory.mktemp("llama") / "model")
    return path


class TestNamedAfterwards:
    """Where no weight file lies the checkpoint is read once: it is hashed as it is written."""

    @pytest.fixture
    def source(self, checkpoint: Path) -> SafetensorsCheckpoint:
        return open_checkpoint(checkpoint)

    def weights(self, engine: Path, source: SafetensorsCheckpoint, *, known: bool) -> SharedWeights:
        refs = {n: WeightRef.of(t.info) for n, t in list(source.files.items())[1:]}  # one is used by nobody
        return SharedWeights(engine, refs, source.read, source.digest, None if known else source.hashes)

    def test_it_is_the_same_file(self, tmp_path: Path, source: SafetensorsCheckpoint) -> None:
        for name in ("known", "unknown"):
            (tmp_path / name).mkdir()
        unknown = self.weights(tmp_path / "unknown" / "e", source, known=False).result()
        known = self.weights(tmp_path / "known" / "e", source, known=True).result()
        assert unknown.path.name == known.path.name
        assert unknown.path.read_bytes() == known.path.read_bytes()
        assert (unknown.digest, unknown.seal) == (known.digest, known.seal)
        assert [p.name for p in unknown.path.parent.iterdir()] == [unknown.path.name]

    def test_tensors_are_read_once(
        self, tmp_path: Path, source: SafetensorsCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hashed, read_range = [], tensor_hashes.read_range
        monkeypatch.setattr(
            tensor_hashes, "read_range", lambda *args: hashed.append(args) or read_range(*args)
        )
        self.weights(tmp_path / "e", source, known=False).result()
        assert len(hashed) == 1  # the one that no weight is made of

    def test_a_file_that_is_there_is_recognized(self, tmp_path: Path, source: SafetensorsCheckpoint) -> None:
        first = self.weights(tmp_path / "e", source, known=False).result()
        again = self.weights(tmp_path / "f", source, known=False).result()
        assert (again.path, again.reused) == (first.path, True)

    def test_a_failure_leaves_nothing(
        self, tmp_path: Path, source: SafetensorsCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(SafetensorsCheckpoint, "digest", lambda self: pytest.fail("unreadable"))
        with pytest.raises(pytest.fail.Exception):
            self.weights(tmp_path / "e", source, known=False).result()
        assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_a_link_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "e")
    with pytest.raises(UsageError, match="its weights would stand there and not be found"):
        SharedWeights(tmp_path / "link", WEIGHTS, ARRAYS.__getitem__, lambda: "s")


class TestBesideTactics:
    """In a build for a GPU that this machine lacks; no kernel is compiled."""

    @pytest.fixture(autouse=True)
    def nothing_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_plan, "compile_all", compile_nothing)

    def test_shared_weights_are_written_while_tactics_are_chosen(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not where this machine's GPU is timed: that wants quiet. The files are the same."""
        choose, files = build_module.choose_for_cuda, "*.weights.safetensors"

        def waits_for_file(*args: Any) -> Any:
            end = time.monotonic() + 60
            while not list(tmp_path.glob(f"ahead/{files}")):
                assert time.monotonic() < end
                time.sleep(0.01)
            return choose(*args)

        def sees_none(*args: Any) -> Any:
            assert not list(tmp_path.glob(f"after/{files}"))
            return choose(*args)

        for name, stand_in, gpu in (("ahead", waits_for_file, None), ("after", sees_none, "an H200")):
            monkeypatch.setattr(build_module, "choose_for_cuda", stand_in)
            monkeypatch.setattr(build_module, "local_gpu", lambda target, sm, gpu=gpu: gpu)
            (tmp_path / name).mkdir()
            build(str(checkpoint), tmp_path / name / "m.engine", BuildOptions(**GPU))
        ahead, after = (sorted((tmp_path / name).glob("*[!n]")) for name in ("ahead", "after"))
        assert [path.suffix for path in ahead] == [".safetensors", ".engine"]
        assert [path.read_bytes() for path in ahead] == [path.read_bytes() for path in after]

    @pytest.mark.parametrize("at", ["the hashes of a file that may be the one", "the file"])
    def test_a_build_that_fails_leaves_no_part_of_a_weight_file(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
    ) -> None:
        """Whatever the writer was at."""
        begun, read_range, read = threading.Event(), tensor_hashes.read_range, FileTensor.read

        def slow_range(*args: Any) -> Iterator[bytes]:
            begun.set()
            time.sleep(0.2)
            yield from read_range(*args)

        def slow_read(tensor: FileTensor) -> np.ndarray:
            begun.set()
            time.sleep(0.2)
            return read(tensor)

        def fails(*args: Any) -> Any:
            assert begun.wait(30)
            raise UnsupportedError("no tactic")

        model, output = shutil.copytree(checkpoint, tmp_path / "model"), tmp_path / "engines" / "m.engine"
        output.parent.mkdir()
        if at == "the file":
            monkeypatch.setattr(FileTensor, "read", slow_read)
        else:
            (output.parent / "other.weights.safetensors").touch()
            monkeypatch.setattr(tensor_hashes, "read_range", slow_range)
        before = list(output.parent.iterdir())
        monkeypatch.setattr(build_module, "choose_for_cuda", fails)
        with pytest.raises(UnsupportedError, match="no tactic"):
            build(str(model), output, BuildOptions(**GPU))
        assert list(output.parent.iterdir()) == before
        assert not [t.name for t in threading.enumerate() if t.name.startswith("tapeout-weights")]
