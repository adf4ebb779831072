"""Buckets as CUDA graphs: bound and captured once, launched every step."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import Any

from cuda.bindings import driver as cu

from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.runtime.engine.container import DTYPES
from tapeout.runtime.engine.launches import (
    Kernel,
    KernelArg,
    Launch,
    LaunchTable,
    Matmul,
    RangeLaunches,
    Region,
)
from tapeout.runtime.engine.program import STEP_INPUTS, Program, Record, View
from tapeout.runtime.engine.program_check import region_problems
from tapeout.runtime.executors.cuda.cublaslt import Call, CublasLt, check_matmul
from tapeout.runtime.executors.cuda.driver import (
    DeviceMemory,
    Function,
    Stream,
    check,
    launch,
    relaxed_capture,
)
from tapeout.runtime.executors.cuda.sampled_ids import SampledIds
from tapeout.runtime.executors.cuda.step_buffers import StepBuffers
from tapeout.runtime.executors.cuda.weights import DeviceWeights
from tapeout.runtime.tensorrt.segments import LoadedSegments

#: Kinds of arguments; see `tapeout.plugins.cuda.Arg`.
_SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
_KINDS = {
    "input", "output", "weight", "step", "workspace", "input_stride", "output_stride", *_SCALARS, "attr",
    "layers", "max_pages", "inbox_words", "outbox_words",
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Everything a launch may point into."""

    arena: DeviceMemory
    workspace: DeviceMemory
    weights: DeviceWeights
    step: StepBuffers
    kv_pool: DeviceMemory
    sampling: SampledIds
    layers: int


class Sampling(Enum):
    """What follows the model in a step: nothing, ids as most requests want them, or everything."""

    NONE, PLAIN, FULL = range(3)


@dataclass(frozen=True)
class Bucket:
    """Padded sizes of a step: packed rows, logit rows, and whether every sequence has one row."""

    rows: int
    logit_rows: int
    decode: bool


@dataclass(frozen=True)
class SegmentCall:
    """A region in one of its segment's profiles, at padded rows by symbol."""

    region: Region
    profile: int
    rows: tuple[tuple[str, int], ...]


Item = Launch | Matmul | SegmentCall


class Replay:
    """Captures one graph for each bucket on first use and keeps it.

    products: the library, where the table has products for it. segments: the table's, with memory to work in.

    Raises EngineIncompatibleError where the library does not run a product of some bucket here.
    """

    def __init__(
        self,
        program: Program,
        table: LaunchTable,
        cubins: Mapping[str, bytes],
        memory: Memory,
        products: CublasLt | None = None,
        segments: LoadedSegments | None = None,
    ) -> None:
        self._program, self._table, self._memory = program, table, memory
        self._products, self._segments = products, segments
        self._regions = {region.first: region for region in table.regions}
        self._sampling_addresses = memory.sampling.addresses()
        self._buffers = {b.name: b for b in program.buffers}
        self._graphs: dict[tuple[Bucket, Sampling], Any] = {}
        self._warm: set[tuple[Matmul, int]] = set()  # products that have run, and at how many rows
        # Sampling is launched like an op whose input is the logits.
        self._sampling = Record("sample", (program.logits,), (), (), {}, "")
        self._check_products()
        with ExitStack() as stack:
            self._functions = [
                stack.enter_context(closing(_function(cubins, kernel))) for kernel in table.kernels
            ]
            self._resources = stack.pop_all()

    def bucket(self, rows: int, sequences: int, logit_rows: int) -> Bucket:
        """The smallest bucket that holds a step.

        A decode-only bucket has as many logit rows as rows, so that few buckets serve every step.
        """
        decode = rows == sequences and rows <= self._table.logit_buckets[-1]
        wanted = max(1, rows if decode else logit_rows)
        sizes = self._table.logit_buckets if decode else self._table.row_buckets
        return Bucket(_at_least(sizes, rows), _at_least(self._table.logit_buckets, wanted), decode)

    def launch(self, bucket: Bucket, stream: Stream, sampling: Sampling) -> None:
        """Replay a bucket with that sampling at its end: one graph launch."""
        key = (bucket, sampling)
        if key not in self._graphs:
            self._warm_up(bucket, stream)
            self._graphs[key] = self._capture(bucket, stream, sampling)
        check(cu.cuGraphLaunch(self._graphs[key], stream.handle), "launching a step")

    def logits_address(self) -> int:
        return self._address(self._program.logits)

    def _check_products(self) -> None:
        """Ask the library about every product of every bucket, so that none fails in a step."""
        if self._products is None:
            return
        rows, logit_rows = self._table.row_buckets, self._table.logit_buckets
        pairs = zip_longest(rows, logit_rows)  # every T and every R occurs: nothing depends on both
        buckets = [Bucket(t or rows[-1], r or logit_rows[-1], decode=False) for t, r in pairs]
        buckets += [Bucket(r, r, decode=True) for r in logit_rows]
        asked = set()
        for bucket in buckets:
            for record, count, item in self._launches(bucket):
                if isinstance(item, Matmul) and (item, count) not in asked:
                    self._products.check(self._call(item, record, count), item.algorithm)
                    asked.add((item, count))

    def _warm_up(self, bucket: Bucket, stream: Stream) -> None:
        """Run each of the bucket's library calls once: libraries load kernels, which a capture forbids.

        They write garbage where the step that follows writes results: between steps nobody reads the arena.
        """
        if self._products is None and self._segments is None:
            return
        self._clear_row_ids(stream)
        fresh: set[tuple[int, int]] = set()  # segments and profiles
        for record, count, item in self._launches(bucket):
            if isinstance(item, Matmul) and (item, count) not in self._warm:
                self._launch(item, record, count, stream)
                self._warm.add((item, count))
            elif isinstance(item, SegmentCall) and (key := (item.region.segment, item.profile)) not in fresh:
                # Ahead of every capture: a context whose shapes change does so in the call that follows.
                self._enqueue(item, stream)
                fresh.add(key)

    def _capture(self, bucket: Bucket, stream: Stream, sampling: Sampling) -> Any:
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(stream.handle, mode), "starting a capture")
        try:
            self._launch_all(bucket, stream, sampling)
        except BaseException:
            # Unchecked: the error to tell is the one that is on its way.
            status, graph = cu.cuStreamEndCapture(stream.handle)
            if status == cu.CUresult.CUDA_SUCCESS:
                cu.cuGraphDestroy(graph)
            raise
        graph = check(cu.cuStreamEndCapture(stream.handle), "ending a capture")
        try:
            return check(cu.cuGraphInstantiate(graph, 0), "instantiating a graph")
        finally:
            cu.cuGraphDestroy(graph)

    def _launch_all(self, bucket: Bucket, stream: Stream, sampling: Sampling) -> None:
        self._clear_row_ids(stream)
        for receiving in self._table.receive:
            self._launch(receiving, None, bucket.rows, stream)
        stream.whole_before_next = True  # later launches read the step's counts ahead of their turns
        for record, count, item in self._launches(bucket):
            self._launch(item, record, count, stream)
        if sampling is not Sampling.NONE:
            ranges = self._table.sample_full if sampling is Sampling.FULL else self._table.sample
            for item in _range(ranges, bucket.logit_rows).launches:
                self._launch(item, self._sampling, bucket.logit_rows, stream)

    def _launches(self, bucket: Bucket) -> Iterator[tuple[Record, int, Item]]:
        """Launches of the bucket's records in their order, with their padded rows.

        A region that a segment runs is one item, with the region's first record.
        """
        rows = {"T": bucket.rows, "R": bucket.logit_rows}
        special = self._table.decode_ranges if bucket.decode else {}
        done = 0  # records that a segment stood for
        for index, record in enumerate(self._program.records):
            if index < done:
                continue
            region = self._regions.get(index)
            profile = -1 if region is None else region.profile_at(rows[region.symbol], bucket.decode)
            if region is not None and profile >= 0:
                done = region.last
                yield record, rows[region.symbol], SegmentCall(region, profile, tuple(rows.items()))
                continue
            count = rows[str(record.outputs[0].shape[0])]
            ranges = special.get(record.signature) or self._table.ranges[record.signature]
            for item in _range(ranges, count).launches:
                yield record, count, item

    def _launch(self, item: Item, record: Record | None, rows: int, stream: Stream) -> None:
        if isinstance(item, SegmentCall):
            self._enqueue(item, stream)
            return
        if isinstance(item, Matmul):
            assert self._products is not None, "the library of the table's products"
            self._products.matmul(self._call(item, record, rows), item.algorithm, stream)
            return
        kernel = self._table.kernels[item.kernel]
        x, y, z = (dim.blocks(rows) for dim in item.grid)
        values, types = [], []
        for argument in item.args:
            value, type_ = self._argument(argument, record)
            values.append(value)
            types.append(type_)
        for index in range(kernel.scratch_pointers):
            values.append(self._scratch() if index == 0 and kernel.scratch_bytes else 0)
            types.append(ctypes.c_void_p)
        function = self._functions[item.kernel]
        launch(
            function, (x, y, z), kernel.threads, kernel.shared_bytes, stream, values, types,
            overlap=kernel.overlap, cluster=kernel.cluster,
        )  # fmt: skip

    def _clear_row_ids(self, stream: Stream) -> None:
        """A segment looks at all rows of a bucket. Those of padding ask for row 0, and not for what an
        earlier, larger step asked for: that lies beyond the rows of this one.
        """
        if self._segments is not None:
            size_bytes = 4 * self._table.logit_buckets[-1]
            stream.zero(self._memory.step.address("row_ids"), size_bytes)
            stream.whole_before_next = True

    def _enqueue(self, call: SegmentCall, stream: Stream) -> None:
        """Queue a segment; what follows waits for all of it, as after any library."""
        assert self._segments is not None, "the table's segments"
        region = call.region
        addresses = [
            *(self._base(name) for name in region.inputs),
            *(self._memory.weights.address(name) for name in region.weights),
            *(self._base(name) for name in region.outputs),
        ]
        with relaxed_capture():
            stream.whole_before_next = True
            self._segments.enqueue(
                region.segment, call.profile, dict(call.rows), addresses, int(stream.handle)
            )

    def _call(self, item: Matmul, record: Record | None, rows: int) -> Call:
        return Call.of(item, rows, lambda argument: self._argument(argument, record)[0])

    def _argument(self, argument: KernelArg, record: Record | None) -> tuple[int | float, type]:
        memory, kind = self._memory, argument.kind
        if kind == "step":
            if argument.name == "kv_pool":
                return memory.kv_pool.address, ctypes.c_void_p
            address = self._sampling_addresses.get(argument.name) or memory.step.address(argument.name)
            return address, ctypes.c_void_p
        if kind == "workspace":
            return memory.workspace.address + int(argument.value), ctypes.c_void_p
        if kind in _SCALARS:
            return argument.value, _SCALARS[kind]
        if kind == "layers":
            return memory.layers, ctypes.c_int32
        if kind == "max_pages":
            return memory.step.max_pages, ctypes.c_int32
        if kind == "inbox_words":
            return memory.step.inbox_words, ctypes.c_int32
        if kind == "outbox_words":
            return memory.sampling.outbox_words, ctypes.c_int32
        assert record is not None, f"argument kind {kind} needs a record"
        if kind == "weight":
            present = [name for name in record.weights if name]  # as in the record's signature
            return memory.weights.address(present[argument.index]), ctypes.c_void_p
        if kind == "attr":
            return int(record.attrs[argument.name]), ctypes.c_int32
        views = record.outputs if kind.startswith("output") else record.inputs
        if kind.endswith("_stride"):
            return views[argument.index].strides[int(argument.value)], ctypes.c_int32
        return self._address(views[argument.index]), ctypes.c_void_p

    def _address(self, view: View) -> int:
        return self._base(view.buffer) + view.offset * DTYPES[view.dtype][1]

    def _base(self, buffer: str) -> int:
        """Where a buffer or a step input begins."""
        if buffer in STEP_INPUTS:
            return self._memory.step.address(buffer)
        return self._memory.arena.address + self._buffers[buffer].offset_bytes

    def _scratch(self) -> int:
        """Triton's global scratch lies at the end of the workspace."""
        return self._memory.workspace.address + self._table.workspace_bytes

    def close(self) -> None:
        for graph in self._graphs.values():
            cu.cuGraphExecDestroy(graph)
        self._graphs.clear()
        self._resources.close()


def check_table(
    table: LaunchTable, program: Program, cubins: Collection[str], segments: Collection[str]
) -> None:
    """EngineIncompatibleError with all that this runtime cannot launch; `cubins` and `segments` are names.

    For a device that is not opened yet: nothing has been loaded when this is told.
    """
    launches = table.everything()
    kinds = {argument.kind for item in launches for argument in item.args}
    problems = [f"arguments of kind {kind!r}, which is unknown" for kind in sorted(kinds - _KINDS)]
    products = {item for item in launches if isinstance(item, Matmul)}
    problems += sorted({p for item in products if (p := check_matmul(item)) is not None})
    problems += [f"no cubin {k.blob}" for k in table.kernels if k.blob not in cubins]
    problems += [f"no segment {s.blob}" for s in table.segments if s.blob not in segments]
    problems += region_problems(table, program)
    if problems:
        raise EngineIncompatibleError(
            "the engine's launches cannot be replayed: " + "; ".join(problems),
            hint="build the engine again with this version: tapeout build",
        )


def _function(cubins: Mapping[str, bytes], kernel: Kernel) -> Function:
    return Function(cubins[kernel.blob], kernel.symbol, kernel.shared_bytes, prefers_l1=kernel.prefers_l1)


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)


def _range(ranges: Sequence[RangeLaunches], rows: int) -> RangeLaunches:
    return next(r for r in ranges if rows <= r.max_rows)
