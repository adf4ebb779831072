"""`tapeout push` and `tapeout pull`: what arrives is what was sent, or it is told what is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from invoking import invoke, ok
from stores import LEVEL, OTHER, Write, make_set, refused

from tapeout.plugins.errors import EngineCorruptError, TapeoutError
from tapeout.runtime import LLM
from tapeout.runtime.engine_set import load_index, save_index
from tapeout.runtime.store import transfer
from tapeout.runtime.store.address import SetAddress, parse_address
from tapeout.runtime.store.pull import Wanted, pull_into_directory
from tapeout.runtime.store.push import push_set
from tapeout.runtime.store.remote import RemoteStore, open_store


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place for a set, in two kinds of store."""
    if request.param == "file":
        yield f"file://{tmp_path}/store/alphabet"
        return
    yield "memory://models/alphabet"
    fsspec.filesystem("memory").store.clear()


def blobs(tmp_path: Path) -> list[Path]:
    return sorted(p for p in (tmp_path / "store" / "alphabet" / "blobs").rglob("*") if p.is_file())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# ---- there and back -----------------------------------------------------------------------------


def test_a_set_comes_back_as_it_was(alphabet_set: Path, url: str, tmp_path: Path) -> None:
    told = ok(invoke("push", alphabet_set, url))
    assert "@latest is now alphabet, index " in told
    assert ok(invoke("pull", url, "-o", tmp_path / "back", "--all")) == f"{tmp_path / 'back'}\n"
    assert contents(tmp_path / "back") == contents(alphabet_set)
    assert ok(invoke("run", tmp_path / "back", "--prompt", "xy", "--temperature", "0")) == "z\n"


def test_what_a_store_has_is_not_sent_again(
    alphabet_set: Path, url: str, tmp_path: Path, write_engine: Write
) -> None:
    first = json.loads(ok(invoke("push", alphabet_set, url, "--json")))
    assert (first["files"], first["uploaded"], first["tag_moved"]) == (3, 3, True)
    again = json.loads(ok(invoke("push", alphabet_set, url, "--json")))
    assert (again["uploaded"], again["uploaded_bytes"], again["tag_moved"]) == (0, 0, False)
    # Another set of the model: other engines, the same weights.
    other = make_set(tmp_path / "alphabet", write_engine, max_seq_len=128)
    second = json.loads(ok(invoke("push", other, url, "--tag", "short", "--json")))
    assert (second["files"], second["uploaded"]) == (3, 2)
    sizes = sum(p.stat().st_size for p in other.glob("*.engine"))
    assert second["uploaded_bytes"] == sizes


def test_only_what_is_wanted_is_fetched(
    alphabet_set: Path, file_url: str, tmp_path: Path, store_cache: Path
) -> None:
    ok(invoke("push", alphabet_set, file_url))
    index = load_index(alphabet_set)
    entries = {entry.target: entry for entry in index.engines}
    here, other = entries[f"cpu:{LEVEL}"], entries[OTHER]
    folder = Path(ok(invoke("pull", file_url)).strip())
    fetched = {path.name for path in (store_cache / "blobs").iterdir()}
    assert fetched == {here.sha256, index.weights[0].sha256}
    assert [entry.target for entry in load_index(folder).engines] == [here.target]
    # The other one joins it, without the weights that are there already.
    assert Path(ok(invoke("pull", file_url, "--target", OTHER)).strip()) == folder
    assert {path.name for path in (store_cache / "blobs").iterdir()} - fetched == {other.sha256}
    assert load_index(folder) == index
    assert ok(invoke("run", folder, "--prompt", "xy", "--temperature", "0")) == "z\n"


def test_a_url_runs_like_a_file(alphabet_set: Path, url: str, store_cache: Path) -> None:
    ok(invoke("push", alphabet_set, url))
    assert ok(invoke("run", url, "--prompt", "wx", "--temperature", "0")) == "yz\n"
    with LLM(url) as llm:
        assert llm.generate("xy")[0].outputs[0].text == "z"
        assert llm.engine.path.is_relative_to(store_cache / "sets")
    shown = json.loads(ok(invoke("inspect", url, "--json")))
    assert (shown["set"], shown["chosen"]) == (url, f"{LEVEL}.engine")
    refused(
        invoke("run", url, "--prompt", "a", "--target", "cuda:h200"), 2, "no engine of target 'cuda:h200'"
    )
    refused(invoke("run", f"{url}@v2", "--prompt", "a"), 2, "has no tag 'v2': it has latest")


def test_tags_name_sets(alphabet_set: Path, url: str, tmp_path: Path, write_engine: Write) -> None:
    ok(invoke("push", alphabet_set, url, "--tag", "v1"))
    refused(invoke("pull", url, "-o", tmp_path / "none"), 2, "has no tag 'latest': it has v1")
    other = make_set(tmp_path / "alphabet", write_engine, max_seq_len=64)
    ok(invoke("push", other, f"{url}@v2"))
    for tag, source in (("v1", alphabet_set), ("v2", other)):
        ok(invoke("pull", url, "--tag", tag, "--all", "-o", tmp_path / tag))
        assert contents(tmp_path / tag) == contents(source)


def test_a_directory_without_an_index_is_pushed_with_one(
    file_url: str, tmp_path: Path, write_engine: Write
) -> None:
    (tmp_path / "letters").mkdir()
    write_engine(tmp_path / "letters" / "a.engine")
    ok(invoke("push", tmp_path / "letters", file_url))
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["a.engine"]
    ok(invoke("pull", file_url, "-o", tmp_path / "back"))
    index = load_index(tmp_path / "back")
    assert (index.model, index.source, index.engines[0].file) == ("letters", "test:0", "a.engine")


# ---- what goes wrong ----------------------------------------------------------------------------


def test_a_push_that_stops_leaves_the_set_before_it(
    alphabet_set: Path, url: str, tmp_path: Path, write_engine: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok(invoke("push", alphabet_set, url))
    newer = make_set(tmp_path / "alphabet", write_engine, max_seq_len=128)
    whole, calls = RemoteStore.put_file, []

    def stopped(self: RemoteStore, local: Path, path: str, callback: Any) -> None:
        calls.append(local.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        whole(self, local, path, callback)

    monkeypatch.setattr(RemoteStore, "put_file", stopped)
    assert invoke("push", newer, url).exit_code == 130
    ok(invoke("pull", url, "--all", "-o", tmp_path / "before"))
    assert contents(tmp_path / "before") == contents(alphabet_set)
    # The same command goes on: one engine is there.
    monkeypatch.setattr(RemoteStore, "put_file", whole)
    assert json.loads(ok(invoke("push", newer, url, "--json")))["uploaded"] == 1
    ok(invoke("pull", url, "--all", "-o", tmp_path / "after"))
    assert contents(tmp_path / "after") == contents(newer)


def test_a_file_that_is_being_sent_has_no_name_in_the_store(
    alphabet_set: Path, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a store shows files that are half written, they are written under another name."""
    from fsspec.implementations.local import LocalFileSystem

    def half(self: Any, local: str, remote: str, **options: Any) -> None:
        Path(remote).write_bytes(Path(local).read_bytes()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "put_file", half)
    refused(invoke("push", alphabet_set, file_url), 1, "writing", "No space left on device")
    assert blobs(tmp_path) == []


def test_a_damaged_blob_is_named_and_never_used(
    alphabet_set: Path, file_url: str, tmp_path: Path, store_cache: Path
) -> None:
    ok(invoke("push", alphabet_set, file_url))
    (weights,) = load_index(alphabet_set).weights
    (blob,) = [path for path in blobs(tmp_path) if path.name == weights.sha256]
    good = blob.read_bytes()
    for bad, found in ((good[:-1] + b"x", f"{len(good):,} bytes with SHA-256"), (good[:50], "50 bytes")):
        blob.write_bytes(bad)
        for args in ((), ("-o", tmp_path / "out"), ("-o", tmp_path / "out", "--all")):
            refused(invoke("pull", file_url, *args), 3, f"{weights.file} is damaged", str(blob), found)
        refused(invoke("run", file_url, "--prompt", "a"), 3, f"{weights.file} is damaged")
        assert not (tmp_path / "out" / weights.file).exists()
        assert not (tmp_path / "out" / "index.json").exists()
        assert not (store_cache / "blobs" / weights.sha256).exists()
    # A push does not look into what is there, unless it is asked to.
    blob.write_bytes(good[:-1] + b"x")
    assert json.loads(ok(invoke("push", alphabet_set, file_url, "--json")))["uploaded"] == 0
    told = json.loads(ok(invoke("push", alphabet_set, file_url, "--verify", "--json")))
    assert told["replaced"] == [weights.file]
    ok(invoke("pull", file_url))


def test_a_damaged_index_or_tag_is_told(alphabet_set: Path, file_url: str, tmp_path: Path) -> None:
    told = json.loads(ok(invoke("push", alphabet_set, file_url, "--json")))
    (index,) = [path for path in blobs(tmp_path) if path.name == told["index_sha256"]]
    text = index.read_bytes()
    index.write_bytes(text.replace(b"alphabet", b"alphabit"))
    refused(invoke("pull", file_url), 3, "the index", "does not match its SHA-256")
    index.unlink()
    refused(invoke("pull", file_url), 3, f"points at the index {index.name}, which is not there")
    tag = tmp_path / "store" / "alphabet" / "tags" / "latest.json"
    for data, words in (
        (b"{", "is not a tag of an engine set"),
        (
            tag.read_bytes().replace(b'"format_version": 1', b'"format_version": 2'),
            "version 2 of the tag format",
        ),
        (tag.read_bytes().replace(index.name.encode(), b"../../secret"), "points at no index"),
    ):
        tag.write_bytes(data)
        refused(invoke("pull", file_url), 3, words)
        ok(invoke("push", alphabet_set, file_url))


def test_a_blob_that_is_gone_is_named(alphabet_set: Path, url: str) -> None:
    ok(invoke("push", alphabet_set, url))
    store = open_store(parse_address(url))
    entry = next(e for e in load_index(alphabet_set).engines if e.target == OTHER)
    store.remove(store.blob_path(entry.sha256))
    refused(invoke("pull", url, "--all"), 3, f"{entry.file} is not there", entry.sha256)


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_set_that_is_not_its_index_is_not_pushed(
    damage: str, alphabet_set: Path, file_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "alphabet"
    shutil.copytree(alphabet_set, folder)
    engine = folder / f"{LEVEL}.engine"
    data = engine.read_bytes()
    words = {"missing": "is missing", "short": "has 7 bytes", "changed": "its index says"}[damage]
    engine.unlink()
    if damage != "missing":
        engine.write_bytes(data[:7] if damage == "short" else data[:-1] + b"?")
    refused(invoke("push", folder, file_url), 3, engine.name, words)
    refused(invoke("pull", file_url), 2, "there may be no engine set at all")


# ---- resuming -----------------------------------------------------------------------------------


def test_a_download_goes_on_where_it_stopped(
    alphabet_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = SetAddress("memory://models/resumed")
    push_set(alphabet_set, address)
    monkeypatch.setattr(transfer, "PIECE_BYTES", 500)
    monkeypatch.setattr("tapeout.runtime.store.remote._PAUSES", ())
    fs = fsspec.filesystem("memory")
    read, asked, broken = type(fs).cat_file, [], True
    (weights,) = load_index(alphabet_set).weights
    assert weights.size_bytes > 3000

    def cat_file(self: Any, path: str, start: int | None = None, end: int | None = None, **kw: Any) -> bytes:
        if path.endswith(weights.sha256):
            asked.append(start)
            if broken and start == 2500:
                raise ConnectionResetError("the line is dead")
        return bytes(read(self, path, start=start, end=end, **kw))

    monkeypatch.setattr(type(fs), "cat_file", cat_file)
    with pytest.raises(TapeoutError, match="ConnectionResetError: the line is dead") as raised:
        pull_into_directory(address, tmp_path / "out", Wanted())
    assert "goes on where it stopped" in str(raised.value.hint)
    (partial,) = (tmp_path / "out").iterdir()
    assert partial.stat().st_size == 2500
    asked.clear()
    broken = False
    pull_into_directory(address, tmp_path / "out", Wanted())
    assert asked[0] == 2500
    assert not partial.exists()
    assert (tmp_path / "out" / weights.file).read_bytes() == (alphabet_set / weights.file).read_bytes()
    fs.store.clear()


def test_what_an_earlier_attempt_left_wrong_is_found(alphabet_set: Path, tmp_path: Path) -> None:
    address = SetAddress("memory://models/wrong")
    push_set(alphabet_set, address)
    (weights,) = load_index(alphabet_set).weights
    out = tmp_path / "out"
    out.mkdir()
    partial = out / f".{weights.file}.{weights.sha256[:16]}.partial"
    partial.write_bytes(b"?" * 100)
    with pytest.raises(EngineCorruptError, match="is damaged"):
        pull_into_directory(address, out, Wanted())
    assert not partial.exists()  # so that the next attempt begins anew
    pull_into_directory(address, out, Wanted())
    partial.write_bytes(b"?" * (weights.size_bytes + 1))
    (out / weights.file).unlink()
    pull_into_directory(address, out, Wanted())
    fsspec.filesystem("memory").store.clear()


def test_passing_failures_are_tried_again(
    alphabet_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = SetAddress("memory://models/shaky")
    push_set(alphabet_set, address)
    monkeypatch.setattr("tapeout.runtime.store.remote._PAUSES", (0.0, 0.0))
    fs = fsspec.filesystem("memory")
    read, failures = type(fs).cat_file, iter([True, True, False] * 100)

    def cat_file(self: Any, path: str, **kw: Any) -> bytes:
        if next(failures):
            raise TimeoutError
        return bytes(read(self, path, **kw))

    monkeypatch.setattr(type(fs), "cat_file", cat_file)
    pull_into_directory(address, tmp_path / "out", Wanted(all=True))
    assert contents(tmp_path / "out") == contents(alphabet_set)
    fs.store.clear()


# ---- directories --------------------------------------------------------------------------------


def test_a_directory_follows_the_set_in_the_store(
    alphabet_set: Path, file_url: str, tmp_path: Path, write_engine: Write
) -> None:
    ok(invoke("push", alphabet_set, file_url))
    out = tmp_path / "out"
    ok(invoke("pull", file_url, "-o", out, "--target", OTHER))
    assert [e.target for e in load_index(out).engines] == [OTHER]
    ok(invoke("pull", file_url, "-o", out))
    assert {e.target for e in load_index(out).engines} == {OTHER, f"cpu:{LEVEL}"}
    # A newer set without the other engine, whose weights are new: what is not in it goes.
    newer = make_set(tmp_path / "alphabet", write_engine, f"cpu:{LEVEL}", max_seq_len=64)
    ok(invoke("push", newer, file_url))
    ok(invoke("pull", file_url, "-o", out))
    assert contents(out) == contents(newer)
    other_model = replace(load_index(newer), model="digits")
    save_index(other_model, out)
    refused(invoke("pull", file_url, "-o", out), 2, "holds a set of model 'digits'")
    (tmp_path / "file").write_text("x")
    refused(invoke("pull", file_url, "-o", tmp_path / "file"), 2, "cannot be used")


# ---- pruning ------------------------------------------------------------------------------------


def test_prune_removes_what_no_tag_needs(
    alphabet_set: Path, file_url: str, tmp_path: Path, write_engine: Write
) -> None:
    ok(invoke("push", alphabet_set, file_url, "--tag", "kept"))
    needed = {path.name for path in blobs(tmp_path)}
    newer = make_set(tmp_path / "alphabet", write_engine, max_seq_len=128)
    ok(invoke("push", newer, file_url))
    (blobs(tmp_path)[0].parent / ".half.tmp").write_bytes(b"a push was killed")
    (tmp_path / "store" / "alphabet" / "tags" / "latest.json").unlink()
    told = json.loads(ok(invoke("push", alphabet_set, f"{file_url}@kept", "--prune", "--json")))
    assert {path.name for path in blobs(tmp_path)} == needed
    assert told["pruned"]["files"] == 4  # two engines, their index, what was killed
    # Where a tag cannot be read nothing is removed.
    (tmp_path / "store" / "alphabet" / "tags" / "bad.json").write_text("{")
    refused(invoke("push", alphabet_set, f"{file_url}@kept", "--prune"), 3, "tag 'bad' is not a tag")
    assert {path.name for path in blobs(tmp_path)} == needed
