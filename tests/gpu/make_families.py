"""The families' part of the bundle: tiny checkpoints, the CPU engine's answers and the GPU's engine.

Used by make_bundle.py, where the compiler is. Tracing takes nearly all of the time and one thread, so every
core makes families by itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_cases import Case, to_json
from gpu_families import LIMITS, REFUSED, FamilyFile, answers_of, family_file, recorded_differences

from tapeout.runtime import LLM, SamplingParams

#: The two best logits must be so many times as far apart as the CPU's logits are from Hugging Face's, or
#: the sums of another machine might choose otherwise.
_CLEAR = 20
_SEEDS = 10


@dataclass(frozen=True)
class Made:
    """A family's part that was made, or why it could not be."""

    name: str
    seconds: float
    problem: str = ""


def build_tiny(
    model: str, path: Path, target: str, timings: Path, front_end: Any = None, **options: Any
) -> None:
    """Build an engine of a tiny model, without its report and without comparing it with Hugging Face.

    Args:
        timings: timing cache of CPU engines.
        front_end: of the model, when other engines are made of it.
        options: fields of BuildOptions.
    """
    from tapeout.compiler.build import build
    from tapeout.compiler.options import BuildOptions

    cache = timings if target == "cpu" else None
    given = {"target": target, "dtype": "float32", "timing_cache": cache, "verify": False, **options}
    build(model, path, BuildOptions(**given), front_end=front_end)
    path.with_name(f"{path.name}.report.json").unlink()


def make_families(names: Sequence[str], target: str, folder: Path, work: Path) -> Iterator[Made]:
    """Make the families' parts, one process a core; yields them as they are done, also those that failed.

    Args:
        folder: where parts go: NAME's engine, and its answers in family_NAME.json.
        work: a folder for what does not stay.
    """
    if not names:
        return
    cores = sorted(os.sched_getaffinity(0))[: len(names)]
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    for core in cores:
        queue.put(core)
    with ProcessPoolExecutor(len(cores), spawn, _keep_to_one_core, (queue,)) as pool:
        done = [pool.submit(make_part, name, target, folder, work) for name in names]
        for future in as_completed(done):
            yield future.result()


def _keep_to_one_core(queue: Any) -> None:
    """Then threads of torch and processes that compile kernels are one each, and in nobody's way."""
    os.sched_setaffinity(0, {queue.get()})


def make_part(name: str, target: str, folder: Path, work: Path) -> Made:
    """Make a family's part; what goes wrong is told in it."""
    start, own, problem = time.monotonic(), work / str(os.getpid()), ""
    own.mkdir(parents=True, exist_ok=True)
    try:
        if name in REFUSED:
            made: Any = check_refused(name, target, own)
        else:
            made = make_family(name, target, folder / family_file(name).engine, own)
        (folder / part_of(name)).write_text(json.dumps(made))
    except Exception:
        problem = traceback.format_exc()
    return Made(name, time.monotonic() - start, problem)


def part_of(name: str) -> str:
    """The file that says what the CPU's engine of a family answers, or why a GPU has none."""
    return f"refused_{name}.json" if name in REFUSED else f"family_{name}.json"


def make_family(name: str, target: str, engine: Path, work: Path) -> dict[str, Any]:
    """Write the engine of a family for `target`; `work` is a folder for what does not stay.

    Returns:
        The CPU engine's answers, and the seed by which no choice among ids was close.
    """
    from tapeout.compiler.front_end import FrontEnd

    file, cpu, timings = family_file(name), work / "cpu.engine", work / "timings.json"
    for seed in range(_SEEDS):
        model = str(write_checkpoint(file, seed, work / "model"))
        front_end = FrontEnd(model)  # both engines come from one trace
        build_tiny(model, cpu, "cpu", timings, front_end, **LIMITS)
        case = file.case(seed)
        if _least_gap(cpu, case) < _CLEAR * recorded_differences()[name]:
            continue
        build_tiny(model, engine, target, timings, front_end, **LIMITS)
        answers, kinds = answers_of(cpu, case)
        assert case.steps <= kinds, f"{name}: no {', '.join(case.steps - kinds)} step"
        return {"seed": seed, "answers": to_json(answers)}
    raise AssertionError(f"{name}: with none of {_SEEDS} seeds all ids are decided clearly")


def check_refused(name: str, target: str, work: Path) -> str:
    """What the build says of a family that is listed as refused."""
    from tapeout.plugins.errors import UnsupportedError

    model = str(write_checkpoint(family_file(name), 0, work / "model"))
    try:
        build_tiny(model, work / "refused.engine", target, work / "timings.json", **LIMITS)
    except UnsupportedError as error:
        assert REFUSED[name] in error.message, f"{name}: {error.message}"
        return error.message
    raise AssertionError(f"{name} can be built for {target}: take it off gpu_families.REFUSED")


def write_checkpoint(file: FamilyFile, seed: int, folder: Path) -> Path:
    """Write the family's tiny model with weights by a seed.

    They are bfloat16's values: half of each float32's bits in the engine are 0, and do not travel.
    """
    from tapeout.model_defs.tiny import tiny_config, write_tiny

    shutil.rmtree(folder, ignore_errors=True)
    write_tiny(folder, tiny_config(file.model_type, **file.config), seed=seed, dtype="bfloat16")
    return folder


def _least_gap(engine: Path, case: Case) -> float:
    """Between the best and the second logit, over all greedy ids of the case's prompts."""
    prompts, asked = zip(*((list(a.prompt), a.params) for a in case.rounds[-1]), strict=True)
    params = [SamplingParams(**{**given, "logprobs": 2}) for given in asked]
    with LLM(engine) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    gaps = []
    for output in outputs:
        for found in output.outputs[0].logprobs or ():
            best, second = sorted((entry.logprob for entry in found.values()), reverse=True)[:2]
            gaps.append(best - second)
    return min(gaps)
