"""A timing worker without a GPU: candidates behave as their names say.

A candidate `cublaslt` has an algorithm of stub_cublaslt.c, or no library where NO_CUBLASLT is set. One called
`crash` ends the process, `hang` never answers, `fault` breaks the context, `wrong`
fails its check; others take as many microseconds as the digits in their names say.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapeout.runtime.engine.target import GpuFacts
from tapeout.runtime.tactic_timer.pack_file import read_pack

_WORDS = (0x7A9E, 1, *[0] * 6)  # the stub's mark, and the number of the algorithm
ALGORITHM = {
    "data": b"".join(word.to_bytes(8, "little") for word in _WORDS).hex(),
    "version": 130100,
    "workspace_bytes": 1024,
}


def send(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def run(index: int, names: list[str], lost: dict[int, str]) -> None:
    send(event="begin", entry=index, candidate=-1, phase="reference")
    for c, name in enumerate(names):
        if c in lost:
            continue
        send(event="begin", entry=index, candidate=c, phase="check")
        if name.startswith("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if name.startswith("hang"):
            time.sleep(600)
        if name.startswith("fault"):
            send(event="fault", reason="CUDA_ERROR_ILLEGAL_ADDRESS")
            sys.exit(0)
        if name.startswith("wrong"):
            send(event="outcome", entry=index, candidate=c, reason="output out: 3 of 8 elements differ")
            continue
        send(event="begin", entry=index, candidate=c, phase="time")
        time_us = float(int(re.sub(r"\D", "", name) or 1) % 1_000_000)
        if name != "cublaslt":
            send(event="outcome", entry=index, candidate=c, time_us=time_us)
        elif os.environ.get("NO_CUBLASLT"):
            send(event="outcome", entry=index, candidate=c, reason="no libcublasLt", unavailable=True)
        else:
            send(event="outcome", entry=index, candidate=c, time_us=time_us, algorithm=ALGORITHM)
    send(event="entry", entry=index, skipped=None)


def main() -> None:
    job = json.loads(sys.stdin.read())
    pack = read_pack(Path(job["pack"])).pack
    facts = GpuFacts("NVIDIA H200", 90, 132, 141 << 30, 13000)
    send(event="ready", gpu=asdict(facts))
    for index in job["entries"]:
        names = [c.tactic for c in pack.entries[index].candidates]
        run(index, names, {int(c): r for c, r in job["lost"].get(str(index), {}).items()})


if __name__ == "__main__":
    main()
