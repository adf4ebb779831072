"""A timing worker without a GPU: candidates behave as their names say.

A candidate `cublaslt` has an algorithm of stub_cublaslt.c, or no library where NO_CUBLASLT is set. One called
`crash` ends the process, `hang` never answers, `fault` breaks the context, `wrong`
fails its check; others take as many microseconds as the digits in their names say. In a whole step they
take as many, or what stands behind a `~`: another number, or `crash`, `hang`, `fault`. Where
REVERSED_STEPS is set, all take about as long alone, and whoever is fast alone is slow there.
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

from tapeout.plugins.cuda import MatmulAlgorithm
from tapeout.runtime.engine.target import GpuFacts
from tapeout.runtime.tactic_timer.pack import Pack
from tapeout.runtime.tactic_timer.pack_file import read_pack
from tapeout.runtime.tactic_timer.plan_search import Plan, fastest_plan, finalists, timed_key

_WORDS = (0x7A9E, 1, *[0] * 6)  # the stub's mark, and the number of the algorithm
ALGORITHM = {
    "data": b"".join(word.to_bytes(8, "little") for word in _WORDS).hex(),
    "version": 130100,
    "workspace_bytes": 1024,
}


def send(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def time_us(name: str, *, in_a_step: bool = False) -> float:
    alone, _, step = name.partition("~")
    number = int(re.sub(r"\D", "", step if in_a_step and step else alone) or 1) % 1_000_000
    if os.environ.get("REVERSED_STEPS"):
        number = 100 + number % 13
        return 1e4 / number if in_a_step else float(number)
    return float(number)


def run_step(index: int, pack: Pack, known: dict[tuple[int, int], tuple[float, str]]) -> None:
    step = pack.steps[index]
    send(event="begin", step=index, phase="operands")
    rivals, shares = {}, {}
    for entry in set(step.ops):
        numbers = {key: c for (e, c), (_, key) in known.items() if e == entry}
        best = finalists({key: us for (e, _), (us, key) in known.items() if e == entry})
        if not best:
            send(event="step", step=index, skipped="nothing was timed")
            return
        rivals[entry] = [numbers[key] for key in best][: 1 if entry in step.fixed else None]
        shares[entry] = known[entry, rivals[entry][0]][0] * step.ops.count(entry)

    def step_us(plan: Plan) -> float:
        names = [pack.entries[entry].candidates[plan[entry]].tactic for entry in step.ops]
        for name in names:
            die(name.partition("~")[2])
        return sum(time_us(name, in_a_step=True) for name in names)

    def compare(plan: Plan, rival: Plan) -> tuple[float, float]:
        send(event="begin", step=index, phase="time")
        return step_us(plan), step_us(rival)

    found = fastest_plan(rivals, shares, compare)
    winners = sorted(found.plan.items())
    send(event="step", step=index, time_us=found.time_us, alone_us=found.alone_us, winners=winners)


def die(how: str) -> None:
    if how.startswith("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if how.startswith("hang"):
        time.sleep(600)
    if how.startswith("fault"):
        send(event="fault", reason="CUDA_ERROR_ILLEGAL_ADDRESS")
        sys.exit(0)


def run(
    index: int, names: list[str], hashes: list[str], lost: dict[int, str],
    known: dict[tuple[int, int], tuple[float, str]],
) -> None:  # fmt: skip
    send(event="begin", entry=index, candidate=-1, phase="reference")
    for c, name in enumerate(names):
        if c in lost:
            continue
        send(event="begin", entry=index, candidate=c, phase="check")
        die(name)
        if name.startswith("wrong"):
            send(event="outcome", entry=index, candidate=c, reason="output out: 3 of 8 elements differ")
            continue
        send(event="begin", entry=index, candidate=c, phase="time")
        if name != "cublaslt":
            send(event="outcome", entry=index, candidate=c, time_us=time_us(name))
            known[index, c] = time_us(name), timed_key(hashes[c], None)
        elif os.environ.get("NO_CUBLASLT"):
            send(event="outcome", entry=index, candidate=c, reason="no libcublasLt", unavailable=True)
        else:
            send(event="outcome", entry=index, candidate=c, time_us=time_us(name), algorithm=ALGORITHM)
            known[index, c] = time_us(name), timed_key(hashes[c], MatmulAlgorithm(**ALGORITHM))
    send(event="entry", entry=index, skipped=None)


def main() -> None:
    job = json.loads(sys.stdin.read())
    pack = read_pack(Path(job["pack"])).pack
    facts = GpuFacts("NVIDIA H200", 90, 132, 141 << 30, 13000)
    send(event="ready", gpu=asdict(facts))
    known: dict[tuple[int, int], tuple[float, str]] = {}
    for entry, candidates in job["known"].items():
        for c, told in candidates.items():
            algorithm = told["algorithm"] and MatmulAlgorithm(**told["algorithm"])
            key = timed_key(pack.entries[int(entry)].candidates[int(c)].kernel_hash, algorithm)
            known[int(entry), int(c)] = told["time_us"], key
    for index in job["entries"]:
        names = [c.tactic for c in pack.entries[index].candidates]
        hashes = [c.kernel_hash for c in pack.entries[index].candidates]
        run(index, names, hashes, {int(c): r for c, r in job["lost"].get(str(index), {}).items()}, known)
    for index in job["steps"]:
        run_step(index, pack, known)


if __name__ == "__main__":
    main()
