"""A pack without a model: entries whose candidates are names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.engine.launches import Grid, Kernel, KernelArg, Launch, RangeLaunches
from tapeout.runtime.tactic_timer.pack import (
    MIXED,
    Candidate,
    Content,
    Entry,
    Operand,
    Output,
    Pack,
    StepCase,
    WholeStep,
)
from tapeout.runtime.tactic_timer.pack_file import PackFile, encode_pack

HERE = Path(__file__).parent
#: Where programs of this folder find the fakes of other folders.
FAKES = [
    HERE,
    HERE.parents[1] / "runtime/executors",
    HERE.parents[1] / "plugins",
    HERE.parents[1] / "compiler",
]


def made_pack(
    *entries: tuple[str, ...],
    target: str = "cuda:h200",
    sm: int = 90,
    cuda: str = "13.0",
    steps: Sequence[WholeStep] = (),
) -> PackFile:
    """A pack with an `add` for each tuple of candidates' names, which are their kernels' too; cubins are no
    code."""
    one = Grid(0, 1)
    symbols = ["add", *sorted({name for names in entries for name in names})]

    def launches(symbol: str) -> RangeLaunches:
        launch = Launch(symbols.index(symbol), (one, one, one), (KernelArg("output", 0, "", 0),))
        return RangeLaunches(4, "", 0, (launch,))

    operand = Operand("float32", ("T", 16), Content("normal", 7, 0.5))
    made = [
        Entry(
            signature=f"add{index}(float32[T,16])", op="add", kind=MIXED, conditions="", rows=4, symbol="T",
            attrs={}, inputs=(operand, operand), weights=(),
            outputs=(Output("out", "float32", ("T", 16), 1e-5, 1e-5),), cache=None,
            check=StepCase(1, 1, 1, ((1, 778),)), timing=StepCase(4, 1, 1, ((4, 781),)), samples=(),
            reference=Candidate("plain", "0", "", launches("add")),
            candidates=tuple(Candidate(n, f"{n}:{index}", "", launches(n)) for n in names),
        )
        for index, names in enumerate(entries)
    ]  # fmt: skip
    kernels = tuple(Kernel("code.cubin", symbol, 128, 0, 0, 2, False) for symbol in symbols)
    tools = ("fill_normal.float32", "fill_integers", "compare.float32", "compare_cache.float32")
    pack = Pack(target, sm, 132, cuda, kernels, dict.fromkeys(tools, 0), tuple(made), tuple(steps))
    return PackFile(pack, {"code.cubin": b"\x7fELF" + bytes(range(256)) * 8}, np.arange(5, dtype=np.float32))


@pytest.fixture
def write_pack(tmp_path: Path) -> Callable[..., tuple[Path, Pack]]:
    """`write_pack(("a", "b"), ("c",))` gives the file and what it holds."""

    def write(*entries: tuple[str, ...], **facts: object) -> tuple[Path, Pack]:
        file = made_pack(*entries, **facts)  # type: ignore[arg-type]
        path = tmp_path / "model.pack"
        path.write_bytes(encode_pack(file))
        return path, file.pack

    return write


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[str, ...]]:
    """The command of a worker of this folder, which finds the fakes."""
    monkeypatch.setattr(sys, "path", [*sys.path, *map(str, FAKES)])
    paths = [*map(str, FAKES), *filter(None, sys.path)]  # the package as this process found it
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return lambda name: (sys.executable, "-W", "ignore", str(HERE / name))
