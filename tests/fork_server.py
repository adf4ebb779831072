"""Processes that begin with what the compiler imports, already imported: ten CPU seconds saved for each.

`fork_server.py serve SOCKET` imports once and then forks a child for every client. `fork_server.py run SOCKET
PROGRAM ARG...` is such a client: a small real process that hands over its directory, environment and open
files, passes signals on, and ends as the child ends, by the same code or signal. Whoever starts it deals with
a process of its own, as with the program itself.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_MOST_FILES = 64
_MOST_BYTES = 1 << 20


# ---- the client: imports nothing that takes time ------------------------------------------------


def run(path: str, program: str, *arguments: str) -> int:
    files = [int(link.name) for link in Path("/proc/self/fd").iterdir()]
    files = [file for file in files if _is_open(file)]  # not the one that read the list
    what = {"argv": [program, *arguments], "cwd": str(Path.cwd()), "files": files}
    what["environment"] = dict(os.environ)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)

        def pass_on(number: int, frame: FrameType | None) -> None:
            server.send(bytes([number]))

        text = json.dumps(what).encode()
        socket.send_fds(server, [len(text).to_bytes(4, "big")], files)
        server.sendall(text)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, pass_on)
        # Only the child holds them open from here on, so that their ends are its end.
        for file in files:
            if file > 2:
                os.close(file)
        ended = server.recv(4)
    if len(ended) < 4:
        sys.stderr.write("the server of forks is gone\n")
        return 70
    code = int.from_bytes(ended, "big", signed=True)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


# ---- the server ---------------------------------------------------------------------------------


def serve(path: str) -> NoReturn:
    """Serve until standard input ends. A client is a connection, its child a descriptor of a pid."""
    _import_all()
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(path)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        children: dict[int, tuple[int, int]] = {}  # by a connection's number: pid, its descriptor
        clients: dict[int, socket.socket] = {}
        while True:
            for key, _ in selector.select():
                if key.fd == sys.stdin.fileno():
                    for pid, _ in children.values():
                        os.killpg(pid, signal.SIGKILL)
                    os._exit(0)  # taking apart what was imported would take seconds
                if key.fileobj is listener:
                    client = listener.accept()[0]
                    pid = _fork(client, [selector, listener, *clients.values()])
                    handle = os.pidfd_open(pid)
                    clients[client.fileno()], children[client.fileno()] = client, (pid, handle)
                    selector.register(client, selectors.EVENT_READ)
                    selector.register(handle, selectors.EVENT_READ, client.fileno())
                elif isinstance(key.fileobj, socket.socket):
                    sent = key.fileobj.recv(16)
                    for number in sent or [signal.SIGKILL]:
                        os.killpg(children[key.fd][0], number)
                    if not sent:
                        selector.unregister(key.fileobj)
                else:
                    client = clients.pop(key.data)
                    pid, handle = children.pop(key.data)
                    selector.unregister(handle)
                    if client.fileno() in selector.get_map():
                        selector.unregister(client)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _tell(client, code)
                    os.close(handle)


def _tell(client: socket.socket, code: int) -> None:
    with client, suppress(OSError):  # it was killed
        client.sendall(code.to_bytes(4, "big", signed=True))


def _fork(client: socket.socket, ours: list[Any]) -> int:
    """A child that runs what the client wants; returns its pid, once it has a process group of its own."""
    head, files, _, _ = socket.recv_fds(client, 4, _MOST_FILES)
    left, text = int.from_bytes(head, "big"), b""
    while len(text) < left:
        text += client.recv(min(left - len(text), _MOST_BYTES))
    what = json.loads(text)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        for thing in (client, *ours):
            thing.close()
        _become(what, files)
    with suppress(PermissionError, ProcessLookupError):  # the child did, or has ended
        os.setpgid(pid, pid)
    for file in files:
        os.close(file)
    return pid


def _become(what: dict[str, Any], files: list[int]) -> None:
    import runpy
    import traceback

    high = [os.dup2(file, 200 + i, inheritable=False) for i, file in enumerate(files)]
    os.closerange(3, 200)
    for source, target in zip(high, what["files"], strict=True):
        os.dup2(source, target, inheritable=target <= 2)
        os.close(source)
    os.chdir(what["cwd"])
    os.environ.clear()
    os.environ.update(what["environment"])
    # As an interpreter that starts would; the server's know its own files.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1, errors="backslashreplace")
    sys.argv = what["argv"]
    code: Any = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _import_all() -> None:
    """Import what builds import, also what they import on the way: by a build that writes nothing."""
    import tempfile
    from importlib import import_module

    from tapeout.compiler.build import build
    from tapeout.compiler.options import BuildOptions
    from tapeout.model_defs import tiny

    for module in ("cli.build", "cli.pull", "cli.push", "cli.time", "compiler.matrix.run_job"):
        import_module(f"tapeout.{module}")
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_tiny(Path(folder, "m"), tiny.tiny_config("llama"), seed=0, dtype="float32")
        for target in ("cpu", "cuda:sm_80"):
            options = BuildOptions(target=target, dry_run=True, max_seq_len=64)
            build(f"{folder}/m", Path(folder, "e"), options)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(run(*sys.argv[2:]))
