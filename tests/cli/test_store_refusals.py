"""`tapeout push` and `tapeout pull`: what cannot be, told by name before anything is sent or fetched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke, ok
from stores import refused


def test_urls_that_lead_nowhere(alphabet_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(invoke("push", alphabet_set, tmp_path / "plain"), 2, "is not the URL of a store")
    refused(invoke("pull", "nosuch://x/y"), 2, "no store is known for nosuch://")
    refused(invoke("pull", f"file://{tmp_path}/empty"), 2, "has no tag 'latest': there may be no engine set")
    refused(invoke("pull", "memory://x@a b"), 2)
    refused(invoke("pull", "https://h/set?token=1"), 2, "it has a query")
    refused(invoke("pull", "memory://x/y@v1", "--tag", "v2"), 2, "names tag 'v1', and --tag 'v2'")
    refused(
        invoke("push", tmp_path, "memory://x/y"),
        2,
        "is a directory, expected an engine file or an engine set",
    )
    for scheme, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        monkeypatch.setitem(sys.modules, package, None)
        refused(invoke("pull", f"{scheme}://bucket/set"), 2, f"needs {package}", f"pip install {package}")


def test_what_is_no_set_is_not_pushed(alphabet_set: Path, tmp_path: Path, file_url: str) -> None:
    engine = next(alphabet_set.glob("*.engine"))
    refused(
        invoke("push", engine, file_url), 2, f"{engine} is a file, expected the directory of an engine set"
    )
    missing = tmp_path / "missing"
    refused(invoke("push", missing, file_url), 2, f"{missing} is not there, expected the directory")
    (tmp_path / "empty").mkdir()
    refused(invoke("push", tmp_path / "empty", file_url), 2, "it has no index.json and no .engine file")
    assert not (tmp_path / "store").exists()


def test_places_that_take_no_files(
    alphabet_set: Path, file_url: str, store_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that takes no files, not even from root, in place of the cache, DIR and the store."""
    ok(invoke("push", alphabet_set, file_url))
    store_cache.mkdir(parents=True)
    for name in ("blobs", "locks", "sets"):
        (store_cache / name).symlink_to("/proc/self/task")
    cannot = f"the cache {store_cache}/blobs cannot be written"
    refused(invoke("pull", file_url), 2, cannot, "TAPEOUT_CACHE_DIR")
    refused(invoke("run", file_url, "--prompt", "x"), 2, cannot)
    refused(
        invoke("pull", file_url, "-o", "/proc/self/task"), 2, "--output: '/proc/self/task' cannot be written"
    )
    refused(invoke("pull", file_url, "-o", "/proc/new"), 2, "--output: '/proc/new' cannot be used")
    refused(invoke("push", alphabet_set, "file:///proc/new"), 1, "file:///proc/new: writing", "failed")

    def denied(self: Any, path: str, **options: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.makedirs", denied)
    other = f"file://{tmp_path}/other"
    refused(
        invoke("push", alphabet_set, other),
        2,
        "is not allowed: PermissionError: Access Denied",
        "credentials",
    )
    assert not (tmp_path / "other").exists()


def test_a_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr("tapeout.runtime.store.remote._PAUSES", (0.0,))
    for host in ("127.0.0.1:9", "host.invalid"):
        result = invoke("pull", f"http://{host}/sets/m", "-o", tmp_path / "out")
        refused(result, 1, f"http://{host}/sets/m: reading", "failed", "check the URL, the credentials")
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
