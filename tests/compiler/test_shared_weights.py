"""The weight file beside an engine, written beside other work: complete, or gone, and never half of one."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tapeout.compiler.shared_weights import SharedWeights
from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import TapeoutError, UsageError

ARRAYS = {f"w{i}": np.full((64, 64), i, np.float32) for i in range(6)}
WEIGHTS = {n: WeightRef.of(TensorInfo(n, a.dtype.name, a.shape)) for n, a in ARRAYS.items()}


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


def test_an_engine_that_is_a_link_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "e")
    with pytest.raises(UsageError, match="its weights would stand there and not be found"):
        SharedWeights(tmp_path / "link", WEIGHTS, ARRAYS.__getitem__, lambda: "s")
