"""An engine all of whose products are cuBLASLt's, with algorithms of this machine's library.

Skipped, with the command that brings it, where the library is missing: no other engine needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from gpu_bundle import Bundle
from gpu_cases import PAGES, logits_of_steps, rms

from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.runtime.engine import Engine, open_engine
from tapeout.runtime.engine.launches import KernelArg, LaunchTable, Matmul, RangeLaunches
from tapeout.runtime.engine.program import Record
from tapeout.runtime.executors import load_executor
from tapeout.runtime.executors.cuda.cublaslt import Call, CublasLt, find_library, version_text
from tapeout.runtime.executors.cuda.driver import open_device

_ADDRESS = 1 << 20  # of operands, as aligned as real ones: asking for algorithms reads none
#: Of the logits' root mean square: bfloat16 against float32 through two layers.
_TOLERANCE = 0.03


@pytest.fixture
def library() -> Iterator[CublasLt]:
    open_device(0).make_current()
    try:
        found = find_library()
    except EngineIncompatibleError as error:
        pytest.skip(f"{error.message}: {error.hint}")
    with closing(CublasLt(found)) as handle:
        yield handle


def test_a_whole_engine(bundle: Bundle, library: CublasLt, report: Callable[[str], None]) -> None:
    """Prompts, decoding and both in a step, each captured at first and replayed the second time."""
    with open_engine(bundle.path("cublaslt.engine")) as engine:
        assert engine.launches is not None
        ranges, signatures = engine.launches.ranges, engine.program.signatures
        by_library = [key for key, row in ranges.items() if {r.tactic for r in row} == {"cublaslt"}]
        assert {signatures[key].op for key in by_library} == {"norm_linear", "linear_add"}
        engine.launches = with_algorithms(engine, engine.launches, library)
        executor = load_executor(engine, num_pages=PAGES * engine.manifest.limits.max_batch_size)
        with closing(executor):
            found = [logits_of_steps(executor) for _ in range(2)]
    errors = {}
    for name, wanted in bundle.json("cublaslt.json").items():
        for turn, got in zip(("captured", "replayed"), found, strict=True):
            errors[name, turn] = rms(got[name] - np.array(wanted)) / rms(np.array(wanted))
    worst = max(errors.values())
    report(f"cuBLASLt {version_text(library.version)}: an engine's logits differ by {worst:.2%} at most")
    assert {place: error for place, error in errors.items() if not error < _TOLERANCE} == {}


def with_algorithms(engine: Engine, table: LaunchTable, library: CublasLt) -> LaunchTable:
    """The table with this library's first choice for every product at every bucket."""
    sizes = {"T": table.row_buckets, "R": table.logit_buckets}
    records = {record.signature: record for record in engine.program.records}
    ranges = {
        key: tuple(
            filled(next(r for r in row if rows <= r.max_rows), rows, records[key], library)
            for rows in sizes[str(records[key].outputs[0].shape[0])]
        )
        for key, row in table.ranges.items()
    }
    return replace(table, ranges=ranges)


def filled(row: RangeLaunches, rows: int, record: Record, library: CublasLt) -> RangeLaunches:
    """A range for one bucket."""

    def value(arg: KernelArg) -> int:
        if arg.kind.endswith("_stride"):
            views = record.inputs if arg.kind == "input_stride" else record.outputs
            return views[arg.index].strides[int(arg.value)]
        return int(arg.value) if arg.kind == "i32" else _ADDRESS

    launches = []
    for item in row.launches:
        if isinstance(item, Matmul):
            best = library.algorithms(Call.of(item, rows, value), 8)[0]
            item = replace(item, algorithm=best.data, version=best.version)
        launches.append(item)
    return replace(row, max_rows=rows, launches=tuple(launches))
