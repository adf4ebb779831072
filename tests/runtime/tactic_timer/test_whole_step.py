"""What a graph of a whole step launches: ops in their order, every layer over what is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tapeout.runtime.engine.launches import Grid, Kernel, KernelArg, Launch, RangeLaunches
from tapeout.runtime.executors.cuda import driver
from tapeout.runtime.executors.cuda.driver import Stream
from tapeout.runtime.tactic_timer import device
from tapeout.runtime.tactic_timer.device import Kernels, Memory, Products
from tapeout.runtime.tactic_timer.launching import Shared
from tapeout.runtime.tactic_timer.pack import (
    DECODE,
    Cache,
    Candidate,
    Content,
    Entry,
    Operand,
    Output,
    Pack,
    StepCase,
    WholeStep,
)
from tapeout.runtime.tactic_timer.tool_kernels import ToolKernels
from tapeout.runtime.tactic_timer.whole_step import StepTimer

TOOLS = ("fill_normal.float32", "fill_integers", "fill_cache.float32")
ARGUMENTS = (
    KernelArg("weight", 0, "", 0),
    KernelArg("step", 0, "kv_pool", 0),
    KernelArg("attr", 0, "layer", 0),
)
KERNELS = ("tool", "product", "attention", "other")


def candidate(name: str) -> Candidate:
    launch = Launch(KERNELS.index(name), (Grid(0, 1),) * 3, ARGUMENTS)
    return Candidate(name, name, "", RangeLaunches(2, name, 0, (launch,)))


def entry(name: str, *rivals: str, cache: Cache | None = None) -> Entry:
    operand = Operand("float32", ("T", 16), Content("normal", 7, 0.5))
    weight = Operand("float32", (16, 16), Content("normal", 3, 0.5))
    case = StepCase(2, 2, 2, ((1, 20), (1, 5)))
    tactics = tuple(map(candidate, (name, *rivals)))
    return Entry(
        signature=name, op="add", kind=DECODE, conditions="", rows=2, symbol="T", attrs={}, inputs=(operand,),
        weights=(weight,), outputs=(Output("out", "float32", ("T", 16), 0, 0),), cache=cache, check=case,
        timing=case, samples=(), reference=tactics[0], candidates=tactics,
    )  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, worker: Callable[[str], Any]) -> Iterator[Any]:
    """A driver whose kernels do nothing, current in this process; `worker` has made it importable."""
    from idle_gpu import IdleCuda

    fake = IdleCuda(free=1 << 28)
    monkeypatch.setattr(driver, "cu", fake)
    monkeypatch.setattr(device, "cu", fake)
    driver.open_device().make_current()
    yield fake
    assert not any(fake.open.values()), fake.open


@pytest.mark.parametrize(("l2_bytes", "turns"), [(1, 1), (20_000, 2), (1 << 30, 8)])
def test_layers_have_weights_and_caches_of_their_own(gpu: Any, l2_bytes: int, turns: int) -> None:
    """Steps that would fit into the L2 cache stand several times in a graph, over other weights."""
    cache = Cache("float32", 1, 16, 16, 5, 0.5, 0, 0)
    entries = (entry("attention", cache=cache), entry("product", "other"))
    table = tuple(Kernel("code.cubin", name, 128, 0, 0, 0, False) for name in KERNELS)
    step = WholeStep(DECODE, "", 2, (1, 0, 1, 0, 1), ())
    pack = Pack("cuda:h200", 90, 132, "13.0", table, dict.fromkeys(TOOLS, 0), entries, (step,))
    candidates = {number: dict(enumerate(e.candidates)) for number, e in enumerate(entries)}
    with closing(Stream()) as stream, Memory(stream) as memory:
        kernels = Kernels(table, lambda blob: b"\x7fELF", stream)
        shared = Shared(
            kernels, ToolKernels(kernels, pack.tools), stream, np.zeros(0, np.float32), Products()
        )
        with closing(kernels), closing(StepTimer(pack, step, memory, shared, l2_bytes, candidates)) as timer:
            gpu.launched.clear()
            assert timer.compare({0: 0, 1: 0}, {0: 0, 1: 1}) == (1000, 1000)  # five launches of 200
            length = 5 * turns
            plan, rival = gpu.launched[:length], gpu.launched[length : 2 * length]
            symbols = ["product", "attention", "product", "attention", "product"]
            assert [launch.symbol for launch in plan] == symbols * turns
            assert [launch.symbol for launch in rival] == [
                s.replace("product", "other") for s in symbols
            ] * turns
            for name, count in (("product", 3), ("attention", 2)):
                values = [launch.values for launch in plan if launch.symbol == name]
                assert len({weight for weight, _, _ in values}) == count * turns
                assert [layer for _, _, layer in values] == list(range(count * turns))
                assert len({pool for _, pool, _ in values}) == 1
            # The rival's layers read what the plan's read: neither finds it in the cache.
            assert [w for w, *_ in (x.values for x in rival)] == [w for w, *_ in (x.values for x in plan)]
            graphs = gpu.open["exec"]
            timer.compare({0: 0, 1: 1}, {0: 0, 1: 1})
            assert (graphs, gpu.open["exec"]) == (2, 1)  # only what is compared is kept
