"""The child process that touches the GPU: `python -m tapeout.runtime.tactic_timer.worker`.

Reads one JSON job from stdin and writes one JSON message a line to stdout. Every risky step is
announced first, so that whoever reads knows which candidate a crash or a hang belongs to.

    {"event": "ready", "gpu": {...}}                     the pack is read, the GPU is open
    {"event": "begin", "entry": e, "candidate": c, "phase": p}   c is -1 while operands and reference run
    {"event": "outcome", "entry": e, "candidate": c, "time_us": t | "reason": r}
        with "algorithm": {...} where a library computed its product, "unavailable": true where there is none
    {"event": "entry", "entry": e, "skipped": why | null}    all outcomes of the entry were told
    {"event": "begin", "step": s, "phase": p}            the same for a whole step, when all entries are done
    {"event": "step", "step": s, "time_us": t, "alone_us": a, "winners": [[e, c], ...]}
        or with "reason": r where it cannot run, "skipped": why where nothing was found out
    {"event": "begin", "region": n, "phase": p}          the same for a region's case, at last
    {"event": "region", "region": n, "time_us": t, "own_us": o}
        or with "reason": r where its segment cannot run or is wrong, with "unavailable": true where its
        package is not there, "skipped": why where nothing was found out
    {"event": "fault", "reason": r}                      the context is lost; the process ends
    {"event": "error", "kind": class, "message": m, "hint": h}   nothing can be timed here
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapeout.plugins.cuda import MatmulAlgorithm
from tapeout.plugins.errors import CapacityError, EngineIncompatibleError, TapeoutError
from tapeout.runtime.engine.launches import Matmul, Segment
from tapeout.runtime.engine.target import GpuFacts
from tapeout.runtime.executors.cuda.driver import Device, Stream, open_device
from tapeout.runtime.tactic_timer.checking import Checker, with_algorithm
from tapeout.runtime.tactic_timer.device import Kernels, Memory, Products, is_alive, l2_bytes
from tapeout.runtime.tactic_timer.launching import Shared
from tapeout.runtime.tactic_timer.pack import Candidate, Pack
from tapeout.runtime.tactic_timer.pack_file import PackFile, read_pack
from tapeout.runtime.tactic_timer.plan_search import Found, Plan, fastest_plan, finalists, timed_key
from tapeout.runtime.tactic_timer.region import RegionChecker, RegionTimer, load_segment
from tapeout.runtime.tactic_timer.region_memory import Chain
from tapeout.runtime.tactic_timer.timing import Timer
from tapeout.runtime.tactic_timer.tool_kernels import ToolKernels
from tapeout.runtime.tactic_timer.whole_step import StepTimer
from tapeout.runtime.tensorrt.segments import check_package

Send = Callable[[dict[str, Any]], None]
#: A candidate, and the algorithm of its product where it has one.
Variant = tuple[Candidate, MatmulAlgorithm | None]

_WARM_UP_US = 100_000.0


class ContextLost(Exception):
    """The context answers errors only; `reason` is the first of them."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Unknown(Exception):
    """A step cannot be timed, because nothing is known of one of its ops."""


@dataclass(frozen=True)
class Timed:
    """A candidate's time alone, with the algorithm it was timed with."""

    candidate: Candidate
    time_us: float
    key: str

    @classmethod
    def of(cls, candidate: Candidate, time_us: float, algorithm: MatmulAlgorithm | None) -> Timed:
        key = timed_key(candidate.kernel_hash, algorithm)
        return cls(candidate if algorithm is None else with_algorithm(candidate, algorithm), time_us, key)


class Worker:
    """Checks and times entries of a pack on one GPU, then whole steps, then regions.

    `known` holds by entry and candidate what was timed.
    """

    def __init__(self, file: PackFile, device: Device, l2: int, send: Send) -> None:
        self._pack, self._plans, self._send, self._l2 = file.pack, file.plans, send, l2
        device.make_current()
        with ExitStack() as stack:
            stream = stack.enter_context(closing(Stream()))
            kernels = stack.enter_context(
                closing(Kernels(file.pack.kernels, file.cubins.__getitem__, stream))
            )
            tools = ToolKernels(kernels, file.pack.tools)
            products = stack.enter_context(closing(Products()))
            self._shared = Shared(kernels, tools, stream, file.numbers, products)
            self._resources = stack.pop_all()
        self._warm = False
        self.known: dict[int, dict[int, Timed]] = {}

    def run(self, index: int, lost: Mapping[int, str]) -> None:
        """Tell the outcome of every candidate of an entry that is not `lost` already.

        Raises ContextLost when a kernel broke the context.
        """
        candidates = self._pack.entries[index].candidates
        untold, skipped = set(range(len(candidates))) - lost.keys(), None
        for candidate in sorted(c for c in untold if candidates[c].reason):
            self._tell(index, candidate, reason=candidates[candidate].reason)
            untold.remove(candidate)
        try:
            self._time(index, self._correct(index, untold), untold)
        except CapacityError as error:
            skipped = error.message
        except TapeoutError as error:  # of the operands or the reference, not of a candidate
            for candidate in sorted(untold):
                self._tell(index, candidate, reason=f"not judged: {error.message}")
        self._send({"event": "entry", "entry": index, "skipped": skipped})

    def run_step(self, index: int) -> None:
        """Tell the fastest plan of a whole step. Raises ContextLost when a kernel broke the context."""
        told: dict[str, Any] = {}
        try:
            with Memory(self._shared.stream) as memory:
                found = self._search(index, memory)
            winners = sorted(found.plan.items())
            told = {"time_us": found.time_us, "alone_us": found.alone_us, "winners": winners}
        except CapacityError as error:
            told = {"skipped": error.message}
        except _Unknown as error:
            told = {"skipped": str(error)}
        except TapeoutError as error:
            told = {"reason": error.message}
        self._send({"event": "step", "step": index, **told})

    def run_region(self, index: int) -> None:
        """Tell what a region takes by its segment and by the fastest of our kernels. Raises ContextLost when
        either broke the context."""
        told: dict[str, Any] = {}
        case = self._pack.region_cases[index]
        try:
            own = [self._fastest(entry) for entry in case.ops]
            segment = self._pack.segments[self._pack.regions[case.region].segment].segment
            check_package([segment], "the pack's segments are")
        except _Unknown as error:
            told = {"skipped": str(error)}
        except EngineIncompatibleError as error:
            told = {"reason": _with_hint(error), "unavailable": True}
        else:
            try:
                told = self._compare_region(index, [c.launches for c in own], segment)
            except CapacityError as error:
                told = {"skipped": error.message}
            except TapeoutError as error:
                told = {"reason": error.message}
        self._send({"event": "region", "region": index, **told})

    def _compare_region(self, index: int, own: Chain, segment: Segment) -> dict[str, Any]:
        case = self._pack.region_cases[index]
        body, shared = self._pack.regions[case.region], self._shared
        with ExitStack() as stack:
            with self._announced(region=index, phase="load"):
                loaded = stack.enter_context(closing(load_segment(segment, self._plans[segment.blob])))
            with Memory(shared.stream) as memory:
                reference = [self._pack.entries[entry].reference.launches for entry in case.ops]
                with self._announced(region=index, phase="reference"):
                    checker = RegionChecker(body, case, reference, segment, loaded, memory, shared)
                    if problem := checker.reference_problem():
                        raise TapeoutError(f"not judged: the region by plain kernels: {problem}")
                with self._announced(region=index, phase="check"):
                    if problem := checker.problem():
                        return {"reason": problem}
            with Memory(shared.stream) as memory, self._announced(region=index, phase="time"):
                timer = RegionTimer(body, case, own, segment, loaded, memory, shared, self._l2)
                time_us, own_us = timer.compare()
        return {"time_us": time_us, "own_us": own_us}

    def _fastest(self, entry: int) -> Candidate:
        """The candidate of an entry that is fastest alone. Raises _Unknown where none has a time."""
        known = self.known.get(entry)
        if not known:
            raise _Unknown(f"no candidate has a time of {self._pack.entries[entry].title()}")
        (best, *_) = finalists({timed.key: timed.time_us for timed in known.values()})
        return next(timed.candidate for timed in known.values() if timed.key == best)

    def close(self) -> None:
        self._resources.close()

    def _search(self, index: int, memory: Memory) -> Found:
        step = self._pack.steps[index]
        rivals, candidates, shares = {}, {}, {}
        for entry in sorted(set(step.ops)):
            known = self.known.get(entry)
            if not known:
                raise _Unknown(f"no candidate has a time of {self._pack.entries[entry].title()}")
            numbers = {timed.key: number for number, timed in known.items()}
            best = [numbers[key] for key in finalists({t.key: t.time_us for t in known.values()})]
            rivals[entry] = best[: 1 if entry in step.fixed else None]
            candidates[entry] = {number: known[number].candidate for number in rivals[entry]}
            shares[entry] = known[best[0]].time_us * step.ops.count(entry)
        with self._announced(step=index, phase="operands"):
            timer = StepTimer(self._pack, step, memory, self._shared, self._l2, candidates)

        def compare(plan: Plan, rival: Plan) -> tuple[float, float]:
            with self._announced(step=index, phase="time"):
                return timer.compare(plan, rival)

        with closing(timer):
            if not self._warm:
                with self._announced(step=index, phase="time"):
                    timer.warm_up({entry: names[0] for entry, names in rivals.items()}, _WARM_UP_US)
                self._warm = True
            return fastest_plan(rivals, shares, compare)

    def _correct(self, index: int, untold: set[int]) -> dict[int, list[Variant]]:
        """Those whose results are right, with their right variants; tells the reasons of the others."""
        entry, correct = self._pack.entries[index], dict[int, list[Variant]]()
        with Memory(self._shared.stream) as memory:
            with self._step(index, -1, "reference"):
                checker = Checker(entry, memory, self._shared)
                if problem := checker.reference_problem():
                    raise TapeoutError(problem)
            for c in sorted(untold):
                if (missing := self._missing_library(index, c)) is not None:
                    self._tell(index, c, reason=missing, unavailable=True)
                    untold.remove(c)
                    continue
                right, problem = self._right_variants(index, c, checker)
                if right:
                    correct[c] = right
                else:
                    self._tell(index, c, reason=problem)
                    untold.remove(c)
        return correct

    def _missing_library(self, index: int, c: int) -> str | None:
        """Why a candidate cannot be tried on this machine at all; None when it can."""
        launches = self._pack.entries[index].candidates[c].launches.launches
        if not any(isinstance(item, Matmul) for item in launches):
            return None
        try:
            with self._step(index, c, "check"):
                self._shared.products.library()
        except TapeoutError as error:  # not there, or it cannot be started with this driver
            return _with_hint(error)
        return None

    def _right_variants(self, index: int, c: int, checker: Checker) -> tuple[list[Variant], str]:
        """Variants of a candidate whose results are right, and what is wrong with the first that are not."""
        right: list[Variant] = []
        try:
            with self._step(index, c, "check"):
                variants = checker.variants(self._pack.entries[index].candidates[c])
        except TapeoutError as error:
            return [], error.message
        problems = []
        for variant in variants:
            try:
                with self._step(index, c, "check"):
                    problem = checker.problem(variant[0])
            except TapeoutError as error:
                problem = error.message
            if problem is None:
                right.append(variant)
            else:
                problems.append(problem)
        return right, problems[0] if problems else ""

    def _time(self, index: int, candidates: Mapping[int, Sequence[Variant]], untold: set[int]) -> None:
        """Tell the times; the fastest so far bounds how long the others are looked at."""
        entry, best_us = self._pack.entries[index], float("inf")
        if not candidates:
            return
        with Memory(self._shared.stream) as memory:
            with self._step(index, -1, "operands"):
                timer = Timer(entry, memory, self._shared, self._l2)
                if not self._warm:
                    timer.warm_up(entry.reference, _WARM_UP_US)
                    self._warm = True
            for c, variants in candidates.items():
                outcome: dict[str, Any] = {}
                for candidate, algorithm in variants:
                    try:
                        with self._step(index, c, "time"):
                            time_us = timer.time_us(candidate, best_us)
                    except TapeoutError as error:
                        outcome = outcome or {"reason": error.message}
                        continue
                    best_us = min(best_us, time_us)
                    if time_us < outcome.get("time_us", float("inf")):
                        outcome = {"time_us": time_us}
                        if algorithm is not None:
                            outcome["algorithm"] = asdict(algorithm)
                        timed = Timed.of(entry.candidates[c], time_us, algorithm)
                        self.known.setdefault(index, {})[c] = timed
                self._tell(index, c, **outcome)
                untold.remove(c)

    def _step(self, entry: int, candidate: int, phase: str) -> AbstractContextManager[None]:
        return self._announced(entry=entry, candidate=candidate, phase=phase)

    @contextmanager
    def _announced(self, **what: Any) -> Iterator[None]:
        """Announce what comes, and look at the context when it failed."""
        self._send({"event": "begin", **what})
        try:
            yield
        except TapeoutError as error:
            if not is_alive():
                raise ContextLost(error.message) from error
            raise

    def _tell(self, entry: int, candidate: int, **outcome: Any) -> None:
        self._send({"event": "outcome", "entry": entry, "candidate": candidate, **outcome})


def _with_hint(error: TapeoutError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def check_pack(pack: Pack, path: Path, gpu: GpuFacts) -> None:
    """Raise EngineIncompatibleError unless the GPU and its driver can run the pack's kernels."""
    if gpu.sm != pack.sm:
        raise EngineIncompatibleError(
            f"{path} holds kernels for sm_{pack.sm} ({pack.target}), this GPU is {gpu.name}, sm_{gpu.sm}",
            hint=f"make a pack for it: tapeout build MODEL --target cuda:sm_{gpu.sm} --pack FILE",
        )
    major = pack.cuda.partition(".")[0]
    if major.isdecimal() and gpu.driver_version // 1000 < int(major):
        have = f"{gpu.driver_version // 1000}.{gpu.driver_version % 1000 // 10}"
        raise EngineIncompatibleError(
            f"{path} holds kernels made with CUDA {pack.cuda}, this machine's driver is for CUDA {have}",
            hint=f"install a driver for CUDA {major}.0 or newer",
        )


def serve(job: Mapping[str, Any], send: Send) -> None:
    """Do a job: {"pack": path, "device": ordinal, "entries": [index], "lost": {index: {candidate: why}},
    "steps": [index], "regions": [index],
    "known": {index: {candidate: {"time_us": t, "algorithm": {...} | null}}}}."""
    try:
        path = Path(job["pack"])
        file = read_pack(path)
        device = open_device(int(job["device"]))
        check_pack(file.pack, path, device.facts)
        worker = Worker(file, device, l2_bytes(int(job["device"])), send)
    except TapeoutError as error:
        kind = type(error).__name__
        send({"event": "error", "kind": kind, "message": error.message, "hint": error.hint})
        return
    worker.known |= _known(file.pack, job["known"])
    send({"event": "ready", "gpu": asdict(device.facts)})
    try:
        for index in job["entries"]:
            known = job["lost"].get(str(index), {})
            worker.run(index, {int(c): reason for c, reason in known.items()})
        for index in job["steps"]:
            worker.run_step(index)
        for index in job["regions"]:
            worker.run_region(index)
    except ContextLost as lost:
        send({"event": "fault", "reason": lost.reason})
        return  # nothing can be freed in a broken context; the end of the process does it
    worker.close()


def _known(pack: Pack, known: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[int, dict[int, Timed]]:
    """What an earlier worker has timed; JSON has text as keys."""

    def timed(entry: int, candidate: int, told: Mapping[str, Any]) -> Timed:
        algorithm = told["algorithm"] and MatmulAlgorithm(**told["algorithm"])
        return Timed.of(pack.entries[entry].candidates[candidate], told["time_us"], algorithm)

    return {
        int(entry): {int(c): timed(int(entry), int(c), told) for c, told in candidates.items()}
        for entry, candidates in known.items()
    }


def main() -> None:
    """Messages go to the real stdout; whatever else prints goes to stderr."""
    with os.fdopen(os.dup(1), "w", buffering=1) as channel:
        os.dup2(2, 1)

        def send(message: dict[str, Any]) -> None:
            channel.write(json.dumps(message) + "\n")
            channel.flush()

        serve(json.loads(sys.stdin.read()), send)


if __name__ == "__main__":
    main()
