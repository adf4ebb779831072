"""Hashes of a checkpoint's tensors: beside other work, given up when that ends, right in any case."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapeout.model_defs import tensor_hashes
from tapeout.model_defs.tensor_hashes import TensorHashes
from tapeout.plugins.errors import UsageError


@pytest.fixture
def parts(tmp_path: Path) -> list[tuple[str, Path, int, int]]:
    (tmp_path / "data").write_bytes(bytes(range(256)) * 40)
    return [(f"t{i}", tmp_path / "data", 100 * i, 300 + i) for i in range(20)]


def expected(parts: list[tuple[str, Path, int, int]]) -> dict[str, str]:
    return {n: hashlib.sha256(p.read_bytes()[start:][:nbytes]).hexdigest() for n, p, start, nbytes in parts}


def test_what_was_hashed_ahead_is_the_same(parts, monkeypatch):
    monkeypatch.setattr(tensor_hashes, "CHUNK_BYTES", 64)
    plain, ahead = TensorHashes(parts), TensorHashes(parts)
    with ahead.ahead():
        assert ahead.result() == expected(parts)
    assert ahead.result() == plain.result() == expected(parts)


def test_nothing_is_hashed_twice(parts, monkeypatch):
    read, read_range = [], tensor_hashes.read_range
    monkeypatch.setattr(
        tensor_hashes,
        "read_range",
        lambda path, start, *rest: read.append(start) or read_range(path, start, *rest),
    )
    hashes = TensorHashes(parts)
    with hashes.ahead():
        hashes.result()
    with hashes.ahead():
        hashes.result()
    assert sorted(read) == sorted(start for _, _, start, _ in parts)


def test_work_that_ends_early_leaves_no_thread_at_work(parts, monkeypatch):
    """A build that is refused does not wait for the checkpoint; asked later, all is hashed after all."""
    opened, end, read_range = threading.Event(), threading.Event(), tensor_hashes.read_range

    def slow(*args: object) -> Iterator[bytes]:
        for chunk in read_range(*args):
            opened.set()
            assert end.wait(30)
            yield chunk

    monkeypatch.setattr(tensor_hashes, "read_range", slow)
    hashes, before = TensorHashes(parts), set(threading.enumerate())
    with hashes.ahead():
        assert opened.wait(30)
        workers = set(threading.enumerate()) - before
    end.set()
    for worker in workers:
        worker.join(30)
    assert workers
    assert not any(worker.is_alive() for worker in workers)
    assert hashes._begun is None  # what was begun is gone, not a result that lacks tensors
    assert hashes.result() == expected(parts)


def test_what_is_read_meanwhile_is_not_read_again(parts, monkeypatch):
    """Tensors that nobody reads are hashed at the end; one that is read twice is hashed once."""
    hashes, read, read_range = TensorHashes(parts, see_reads=True), [], tensor_hashes.read_range
    data = {name: memoryview(path.read_bytes()[start:][:nbytes]) for name, path, start, nbytes in parts}

    def counted(path: Path, start: int, *rest: int) -> Iterator[bytes]:
        read.append(start // 100)
        return read_range(path, start, *rest)

    monkeypatch.setattr(tensor_hashes, "read_range", counted)
    hashes.read("t0", memoryview(b"before anybody wants it"))
    with hashes.while_reading():
        for i in (3, 4, 3, 19):
            hashes.read(f"t{i}", data[f"t{i}"])
    hashes.read("t5", memoryview(b"afterwards"))
    assert hashes.result() == expected(parts)
    assert sorted(read) == sorted({*range(20)} - {3, 4, 19})


def test_reading_that_fails_leaves_nothing_known(parts):
    hashes = TensorHashes(parts, see_reads=True)

    def fails() -> None:
        with hashes.while_reading():
            hashes.read("t1", memoryview(b"of a file that was replaced"))
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fails()
    assert hashes.result() == expected(parts)


def test_a_file_that_shrank_is_told_with_the_tensor(parts):
    parts[0][1].write_bytes(b"short")
    with pytest.raises(UsageError, match=r"tensor 't0' cannot be read.*ended at byte 5"):
        TensorHashes(parts).result()
