"""Buckets as CUDA graphs: bound and captured once, launched every step."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.runtime.engine.launches import KernelArg, Launch, LaunchTable, RangeLaunches
from tapeout.runtime.engine.program import STEP_INPUTS, Program, Record, View
from tapeout.runtime.executors.cuda.driver import DeviceMemory, Stream, check, launch, load_function
from tapeout.runtime.executors.cuda.step_buffers import StepBuffers
from tapeout.runtime.executors.cuda.weights import DeviceWeights

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int8": 1}
_SCRATCH_ALIGNMENT = 128


@dataclass(frozen=True)
class Memory:
    """Everything a launch may point into."""

    arena: DeviceMemory
    workspace: DeviceMemory
    weights: DeviceWeights
    step: StepBuffers
    kv_pool: DeviceMemory
    state: Mapping[str, int]  # addresses of the executor's own buffers: last_ids, out_ids, out_finite
    layers: int


class Replay:
    """Captures one graph for each bucket on first use and keeps it."""

    def __init__(
        self, program: Program, table: LaunchTable, cubins: Mapping[str, bytes], memory: Memory
    ) -> None:
        self._program, self._table, self._memory = program, table, memory
        self._buffers = {b.name: b for b in program.buffers}
        self._functions = [load_function(cubins[k.blob], k.symbol, k.shared_bytes) for k in table.kernels]
        self._graphs: dict[tuple[int, int], Any] = {}
        # Sampling is launched like an op whose input is the logits.
        self._sampling = Record("sample", (program.logits,), (), (), {}, "")

    def bucket(self, rows: int, logit_rows: int) -> tuple[int, int]:
        """The padded sizes that serve a step."""
        return _at_least(self._table.row_buckets, rows), _at_least(self._table.logit_buckets, logit_rows)

    def launch(self, bucket: tuple[int, int], stream: Stream) -> None:
        """Replay a bucket: one graph launch."""
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket, stream)
        check(cu.cuGraphLaunch(self._graphs[bucket], stream.handle), "launching a step")

    def logits_address(self) -> int:
        return self._address(self._program.logits)

    def _capture(self, bucket: tuple[int, int], stream: Stream) -> Any:
        rows = {"T": bucket[0], "R": bucket[1]}
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(stream.handle, mode), "starting a capture")
        try:
            for item in self._table.fill:
                self._launch(item, None, rows["T"], stream)
            for record in self._program.records:
                count = rows[str(record.outputs[0].shape[0])]
                for item in _range(self._table.ranges[record.signature], count).launches:
                    self._launch(item, record, count, stream)
            for item in _range(self._table.sample, rows["R"]).launches:
                self._launch(item, self._sampling, rows["R"], stream)
        finally:
            graph = check(cu.cuStreamEndCapture(stream.handle), "ending a capture")
        executable = check(cu.cuGraphInstantiate(graph, 0), "instantiating a graph")
        check(cu.cuGraphDestroy(graph), "freeing a graph")
        return executable

    def _launch(self, item: Launch, record: Record | None, rows: int, stream: Stream) -> None:
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
        launch(function, (x, y, z), kernel.threads, kernel.shared_bytes, stream, values, types)

    def _argument(self, argument: KernelArg, record: Record | None) -> tuple[int | float, type]:
        memory, kind = self._memory, argument.kind
        if kind == "step":
            if argument.name == "kv_pool":
                return memory.kv_pool.address, ctypes.c_void_p
            if argument.name in memory.state:
                return memory.state[argument.name], ctypes.c_void_p
            return memory.step.address(argument.name), ctypes.c_void_p
        if kind == "workspace":
            return memory.workspace.address + int(argument.value), ctypes.c_void_p
        if kind in ("i32", "i64", "f32"):
            return argument.value, {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}[kind]
        if kind == "layers":
            return memory.layers, ctypes.c_int32
        if kind == "max_pages":
            return memory.step.max_pages, ctypes.c_int32
        assert record is not None, f"argument kind {kind} needs a record"
        if kind == "weight":
            name = record.weights[argument.index]
            return (memory.weights.address(name) if name else 0), ctypes.c_void_p
        if kind == "attr":
            return int(record.attrs[argument.name]), ctypes.c_int32
        if kind not in ("input", "output", "input_stride", "output_stride"):
            raise EngineIncompatibleError(
                f"the engine's launches have arguments of kind {kind!r}, which is unknown"
            )
        views = record.inputs if kind.startswith("input") else record.outputs
        if kind.endswith("_stride"):
            return views[argument.index].strides[int(argument.value)], ctypes.c_int32
        return self._address(views[argument.index]), ctypes.c_void_p

    def _address(self, view: View) -> int:
        if view.buffer in STEP_INPUTS:
            return self._memory.step.address(view.buffer)
        base = self._memory.arena.address + self._buffers[view.buffer].offset_bytes
        return base + view.offset * _ITEM_BYTES[view.dtype]

    def _scratch(self) -> int:
        """Triton's global scratch lies at the end of the workspace."""
        return self._memory.workspace.address + self._table.workspace_bytes

    def close(self) -> None:
        for graph in self._graphs.values():
            cu.cuGraphExecDestroy(graph)
        self._graphs.clear()


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)


def _range(ranges: Sequence[RangeLaunches], rows: int) -> RangeLaunches:
    return next(r for r in ranges if rows <= r.max_rows)
