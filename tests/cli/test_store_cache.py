"""The cache of `tapeout pull` and `tapeout run URL`: fetched once, bounded, never pulled away."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke, ok

from tapeout.plugins.errors import UsageError
from tapeout.plugins.native.host import detect_host
from tapeout.runtime import LLM
from tapeout.runtime.engine_set import EngineSetIndex, describe_engine, load_index, save_index
from tapeout.runtime.store.options import parse_bytes

LEVEL = detect_host().level
TAPEOUT = Path(sys.executable).with_name("tapeout")
Write = Callable[..., Path]


def make_set(folder: Path, write: Write, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    entry, shared = describe_engine(write(folder / "cpu.engine", shared=True, **changes))
    save_index(EngineSetIndex.of("alphabet", "test:0", (entry,), shared, {}), folder)
    return folder


class Sets:
    """Sets of one engine that weigh about the same, each at a URL of its own."""

    def __init__(self, root: Path, write: Write) -> None:
        self.root, self._write = root, write

    def url(self, number: int) -> str:
        """The set of that number; all have the same weights."""
        folder, store = self.root / f"{number}" / "alphabet", self.root / f"store{number}"
        if not store.exists():
            folder.parent.mkdir()
            make_set(folder, self._write, generation={"max_new_tokens": number + 1})
            ok(invoke("push", folder, f"file://{store}"))
        return f"file://{store}"

    def engine_bytes(self) -> int:
        return max(path.stat().st_size for path in self.root.rglob("*.engine"))

    def weight_bytes(self) -> int:
        return next(self.root.rglob("*.safetensors")).stat().st_size


@pytest.fixture
def sets(tmp_path: Path, write_engine: Write) -> Sets:
    (tmp_path / "sets").mkdir()
    return Sets(tmp_path / "sets", write_engine)


def engines(store_cache: Path) -> set[int]:
    """Numbers of the sets whose engine the cache has."""
    return {
        json.loads(text)["max_new_tokens"] - 1
        for path in (store_cache / "blobs").iterdir()
        for text in re.findall(rb'\{"max_new_tokens":\d+\}', path.read_bytes().replace(b"\\", b""))[:1]
    }


# ---- size ---------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes(sets: Sets, store_cache: Path) -> None:
    folders = {}
    for number in (0, 1):
        folders[number] = Path(ok(invoke("pull", sets.url(number))).strip())
    limit = sets.weight_bytes() + 2 * sets.engine_bytes() + 100
    assert engines(store_cache) == {0, 1}
    for number, day in ((0, 1), (1, 2)):
        os.utime((folders[number] / "cpu.engine").resolve(), (day, day))
    # Running the older one from its directory makes it the newer one.
    ok(invoke("run", folders[0], "--prompt", "a"))
    ok(invoke("pull", sets.url(2), "--cache-size", str(limit)))
    assert engines(store_cache) == {0, 2}
    assert not folders[1].exists()
    assert ok(invoke("run", folders[0], "--prompt", "xy", "--temperature", "0")) != ""


def test_the_environment_says_the_size(
    sets: Sets, store_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok(invoke("pull", sets.url(0)))
    monkeypatch.setenv("TAPEOUT_CACHE_BYTES", str(sets.weight_bytes() + sets.engine_bytes() + 100))
    ok(invoke("run", sets.url(1), "--prompt", "a"))
    assert engines(store_cache) == {1}
    monkeypatch.setenv("TAPEOUT_CACHE_BYTES", "plenty")
    result = invoke("run", sets.url(1), "--prompt", "a")
    assert result.exit_code == 2
    assert "TAPEOUT_CACHE_BYTES is 'plenty', expected bytes such as" in result.stderr


def test_a_set_that_can_never_fit_is_refused_before_anything_is_fetched(
    sets: Sets, store_cache: Path
) -> None:
    result = invoke("pull", sets.url(0), "--cache-size", "100")
    assert result.exit_code == 4
    assert "cpu.engine take" in result.stderr
    assert "may hold 100" in result.stderr
    assert list((store_cache / "blobs").iterdir()) == []


def test_what_is_in_use_stays(sets: Sets, store_cache: Path) -> None:
    """A process runs from the cache; another one may not take its engine or its weights away."""
    urls = [sets.url(0), sets.url(1)]
    limit = sets.weight_bytes() + sets.engine_bytes() + 100
    script = (
        "import sys; from tapeout.runtime import LLM\n"
        f"with LLM({urls[0]!r}) as llm:\n"
        "    print('ready', flush=True); sys.stdin.read()\n"
        "    print(llm.generate('xy')[0].outputs[0].text)\n"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        result = invoke("pull", urls[1], "--cache-size", str(limit))
        assert result.exit_code == 4
        assert "what else it holds is in use" in result.stderr
        assert engines(store_cache) == {0}
        out, _ = process.communicate("")
        assert out == "z\n"
    ok(invoke("pull", urls[1], "--cache-size", str(limit)))
    assert engines(store_cache) == {1}


def test_what_a_stopped_download_left_goes_too(sets: Sets, store_cache: Path) -> None:
    ok(invoke("pull", sets.url(0)))
    leftover = store_cache / "blobs" / f"{'0' * 64}.{10**9}.partial"
    leftover.write_bytes(b"half")
    os.utime(leftover, (1, 1))
    limit = sets.weight_bytes() + 3 * sets.engine_bytes()
    ok(invoke("pull", sets.url(1), "--cache-size", str(limit)))
    assert not leftover.exists()
    assert engines(store_cache) == {0, 1}


def test_an_llm_holds_what_it_runs(sets: Sets, store_cache: Path) -> None:
    url = sets.url(0)
    with LLM(url) as llm:
        blob = llm.engine.path.resolve()
        limit = sets.weight_bytes() + sets.engine_bytes() + 100
        assert invoke("pull", sets.url(1), "--cache-size", str(limit)).exit_code == 4
        assert blob.exists()
    ok(invoke("pull", sets.url(1), "--cache-size", str(limit)))
    assert not blob.exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("50GB", 50 * 10**9),
        ("1.5GiB", 3 << 29),
        ("2 mib", 2 << 20),
        ("1T", 10**12),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "--cache-size") == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "1 XB", "0x10", "1,000"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--cache-size is"):
        parse_bytes(text, "--cache-size")


def test_a_cache_that_cannot_be_made(sets: Sets, store_cache: Path, tmp_path: Path) -> None:
    store_cache.parent.write_text("a file")
    result = invoke("pull", sets.url(0))
    assert result.exit_code == 2
    assert "cannot be used" in result.stderr
    assert "TAPEOUT_CACHE_DIR" in result.stderr


# ---- over HTTP, several processes ---------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
    """Serves a directory, and counts the bytes of bodies by the last part of their path."""

    def __init__(self, root: Path, *, ranges: bool, slow: float = 0.0) -> None:
        self.root, self.ranges, self.slow = root, ranges, slow
        self.sent: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.server.root / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data, status = path.read_bytes(), 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        total = len(data)
        if wanted and self.server.ranges:
            begin, end = int(wanted[1]), min(int(wanted[2]) + 1, total)
            data, status = data[begin:end], 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {wanted[1]}-{wanted[2]}/{total}")  # type: ignore[index]
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            time.sleep(self.server.slow)
            self.wfile.write(data)
            self.server.sent[path.name] += len(data)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(params=[True, False], ids=["ranges", "whole files"])
def server(request: pytest.FixtureRequest, sets: Sets) -> Iterator[Server]:
    sets.url(0)
    with Server(sets.root / "store0", ranges=request.param, slow=0.3) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_processes_that_want_the_same_fetch_it_once(server: Server, sets: Sets, store_cache: Path) -> None:
    command = [TAPEOUT, "pull", server.url]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    printed = set()
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        printed.add(out.strip())
    (folder,) = printed
    assert ok(invoke("run", folder, "--prompt", "xy", "--temperature", "0")) == "z\n"
    index = load_index(sets.root / "0" / "alphabet")
    for _, (size_bytes, sha256) in index.files().items():
        # A probe for ranges reads a byte of the body, or begins to read all of it and stops.
        most = size_bytes + 1 if server.ranges else 2 * size_bytes
        assert size_bytes <= server.sent[sha256] <= most, server.sent
    assert {path.name for path in (store_cache / "blobs").iterdir()} == {
        sha256 for _, sha256 in index.files().values()
    }


def test_http_can_only_be_read(server: Server, sets: Sets, tmp_path: Path) -> None:
    result = invoke("push", sets.root / "0" / "alphabet", server.url)
    assert result.exit_code == 2
    assert "can only be read" in result.stderr
    missing = invoke("pull", f"{server.url}/nothing", "-o", tmp_path / "out")
    assert missing.exit_code == 2
    assert "has no tag 'latest': there may be no engine set at all" in missing.stderr
    ok(invoke("pull", server.url, "-o", tmp_path / "out"))
    assert ok(invoke("run", tmp_path / "out", "--prompt", "xy", "--temperature", "0")) == "z\n"
