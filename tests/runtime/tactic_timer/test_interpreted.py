"""The timing worker on real kernels, in Triton's interpreter: what is right is timed, what is wrong told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "executors"))
from stub_cublaslt import compile_stub

Told = list[dict[str, Any]]


def job(op: str, case: str, *places: tuple[str, int], take: int = 2, **spoil: str) -> dict[str, Any]:
    numbers = {name.removeprefix("c").replace("reference", "-1"): how for name, how in spoil.items()}
    return {"op": op, "case": case, "places": places, "take": take, "spoil": numbers}


def product(op: str, case: str, place: tuple[str, int]) -> dict[str, Any]:
    return {**job(op, case, place), "provider": "cublaslt"}


RIGHT = {
    "linear_add": {**job("linear_add", "float32 96x64 bias", ("mixed", 8)), "step": 3},
    "linear_add, bfloat16": job("linear_add", "bfloat16 96x64", ("mixed", 8)),
    "norm_linear": job("norm_linear", "float32 64x320 silu", ("mixed", 2)),
    "decode": {**job("rope_attention", "float32 decode, qk norm", ("decode", 2)), "step": 2},
    "rope_attention": job("rope_attention", "float32 decode, qk norm", ("mixed", 4)),
}
ATTENTION = ("rope_attention", "float32 decode", ("decode", 1))
WRONG = {
    "outputs": job(
        "linear_add", "float32 96x64 bias", ("mixed", 8), take=3, c0="wrong", c1="outside", c2="unwritten"
    ),
    "cache": job(*ATTENTION, c0="cache", c1="raises"),  # type: ignore[arg-type]
    "reference": job(*ATTENTION, reference="wrong"),  # type: ignore[arg-type]
    "reference's cache": job(*ATTENTION, reference="cache"),  # type: ignore[arg-type]
}


PRODUCTS = {
    "linear_add": product("linear_add", "bfloat16 96x64 bias", ("mixed", 8)),
    "norm_linear": product("norm_linear", "bfloat16 96x64 bias", ("mixed", 8)),
    "gated": product("norm_linear", "bfloat16 160x48 bias gelu_tanh", ("mixed", 8)),
}
NO_LIBRARY = {"no library": PRODUCTS["gated"]}


def run(jobs: dict[str, Any], **variables: str) -> dict[str, Told]:
    """The messages of every job; one process runs them all, since starting it takes seconds."""
    here = Path(__file__).parent
    fakes = [here, *(here.parents[1] / f for f in ("runtime/executors", "plugins", "compiler"))]
    command = [sys.executable, "-W", "ignore", "interpreted_gpu.py", *map(json.dumps, jobs.values())]
    paths = [*map(str, fakes), *filter(None, sys.path)]  # the package as this process found it
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, cwd=here, env=environment, check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[Told] = [[]]
    for message in map(json.loads, done.stdout.splitlines()):
        found[-1].append(message)
        if message["event"] == "end":
            assert not any(message["open"].values())  # only the context outlives a pack
            found.append([])
    return dict(zip(jobs, found, strict=False))


@pytest.fixture(scope="module")
def told() -> dict[str, Told]:
    return run({**RIGHT, **WRONG, **NO_LIBRARY}, STUB_CUBLASLT="")


def test_whole_steps_of_right_kernels(told: dict[str, Told]) -> None:
    """Every layer over its own weights and its own part of the KV pool; a block takes as long as alone."""
    for name in ("linear_add", "decode"):
        messages = told[name]
        (step,) = [m for m in messages if m["event"] == "step"]
        alone = {m["candidate"]: m["time_us"] for m in messages if m["event"] == "outcome"}
        assert step["time_us"] == pytest.approx(RIGHT[name]["step"] * min(alone.values()))
        assert step["alone_us"] == step["time_us"]
        ((entry, winner),) = step["winners"]
        assert (entry, alone[winner]) == (0, min(alone.values()))
        phases = [m["phase"] for m in messages if "step" in m and m["event"] == "begin"]
        assert phases == ["operands", *["time"] * (len(phases) - 1)]


def outcomes(messages: Told) -> list[float | str]:
    return [m.get("time_us") or m["reason"] for m in messages if m["event"] == "outcome"]


def names(messages: Told) -> list[str]:
    return [name for m in messages if m["event"] == "title" for name in m["candidates"]]


def reasons(messages: Told) -> dict[int, str]:
    return {m["candidate"]: m.get("reason") for m in messages if m["event"] == "outcome"}


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_are_timed(told: dict[str, Told], name: str) -> None:
    messages = told[name]
    assert len(outcomes(messages)) == len(names(messages)) >= 2
    assert not [o for o in outcomes(messages) if isinstance(o, str)]
    assert [m["skipped"] for m in messages if m["event"] == "entry"] == [None] * len(RIGHT[name]["places"])
    phases = [m["phase"] for m in messages if m["event"] == "begin"]
    assert phases.index("reference") < phases.index("check") < phases.index("time")


def test_wrong_outputs(told: dict[str, Told]) -> None:
    found = reasons(told["outputs"])
    assert found[0].startswith("output out: 1 of 480 elements differ, by at most 1e+06 (tolerance 2e-05 + ")
    assert found[1] == "output out: 1 elements outside its rows were written"
    assert found[2] == "output out: 1 of 480 elements are NaN or were not written"


def test_a_wrong_cache_and_a_launch_that_fails(told: dict[str, Told]) -> None:
    found = reasons(told["cache"])
    assert found[0] == "the KV cache differs from the reference's in 1 elements"
    assert found[1].startswith("CUDA: launching a kernel: CUDA_ERROR_INVALID_VALUE")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("reference", "the reference, differs from torch's: output out: 1 of"),
        (
            "reference's cache",
            "the reference: 257 elements of the KV cache changed, 256 belong to the step's rows",
        ),
    ],
)
def test_a_wrong_reference_judges_nobody(told: dict[str, Told], name: str, reason: str) -> None:
    found = outcomes(told[name])
    assert len(found) == len(names(told[name])) > 0
    assert all(str(o).startswith("not judged: triton_") and reason in str(o) for o in found)


def test_products_of_a_library(tmp_path: Path) -> None:
    """What is around a product is ours and real, the library is a stand-in whose first algorithm is wrong."""
    told = run(PRODUCTS, STUB_CUBLASLT=str(compile_stub(tmp_path)))
    assert all(names(messages) == ["cublaslt"] for messages in told.values())
    found = {n: next(m for m in messages if m["event"] == "outcome") for n, messages in told.items()}
    for outcome in found.values():
        assert outcome["time_us"] > 0, outcome
        algorithm = outcome["algorithm"]
        assert (algorithm["version"], algorithm["workspace_bytes"]) == (130100, 2048)
        assert bytes.fromhex(algorithm["data"])[8] == 2  # the fastest of those that are right


def test_a_machine_without_the_library(told: dict[str, Told]) -> None:
    (outcome,) = [m for m in told["no library"] if m["event"] == "outcome"]
    told = "libcublasLt was not found (pip install 'nvidia-cublas==13.*')"
    assert (outcome["reason"], outcome["unavailable"]) == (told, True)
