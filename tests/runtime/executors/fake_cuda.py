# ruff: noqa: N802 (methods have the names of the driver's functions)
"""A CUDA driver that runs on the host: memory is real, copies are done, launches are written down.

It stands in for `cuda.bindings.driver`, whose enums it uses. What a kernel would compute is up to the
test: `on_launch` is called for every launch of a replayed graph.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS


@dataclass(frozen=True)
class Launched:
    """One launch of a replayed graph."""

    symbol: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    values: tuple[int | float, ...]
    types: tuple[type, ...]
    overlap: bool


def words(address: int, count: int) -> list[int]:
    """int32 values at an address."""
    return list((ctypes.c_int32 * count).from_address(address))


class FakeCuda:
    """`open` counts what was made and not freed, by kind."""

    def __init__(
        self, *, sm: int = 90, name: str = "NVIDIA H200", driver: int = 13000, free: int = 1 << 30
    ) -> None:
        self.sm, self.name, self.driver, self.free = sm, name, driver, free
        self.open = {"memory": 0, "pinned": 0, "stream": 0, "event": 0, "module": 0, "graph": 0, "exec": 0}
        self.launched: list[Launched] = []
        self.launched_outside: list[Launched] = []  # of graphs
        self.graph_launches = 0
        self.on_launch: Callable[[Launched], None] = lambda launched: None
        self.fail: set[str] = set()  # calls that report an error
        self.contextless_calls: list[str] = []
        self.capture_mode = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL  # of the one thread
        self.node_types: dict[str, Any] = {}  # of what is captured, by symbol, where it is no kernel
        self.stream_waits: list[tuple[int, int]] = []  # (stream that waits, event)
        self._current = threading.local()
        self._blocks: dict[int, Any] = {}
        self._handles = itertools.count(1)
        self._recording: list[Launched] | None = None
        self._graphs: dict[int, list[Launched]] = {}

    def __getattr__(self, name: str) -> Any:
        """Enums are the real ones; a call that is not made below is a fault of the test."""
        if name.startswith("CU"):
            return getattr(real, name)
        raise AttributeError(name)

    def _done(self, call: str, *values: Any) -> tuple[Any, ...]:
        if not getattr(self._current, "context", None):
            self.contextless_calls.append(call)
        if call in self.fail:
            return (real.CUresult.CUDA_ERROR_LAUNCH_FAILED, *(None for _ in values))
        return (OK, *values)

    # ---- device -----------------------------------------------------------------------------

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (OK,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return (OK, ordinal) if ordinal == 0 else (real.CUresult.CUDA_ERROR_INVALID_DEVICE, None)

    def cuGetErrorString(self, status: Any) -> tuple[Any, ...]:
        return OK, b"made up by a test"

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Any, ...]:
        return OK, self.name.encode().ljust(size, b"\0")

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        return OK, 2 * self.free

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return OK, self.driver

    def cuDeviceGetAttribute(self, which: Any, device: int) -> tuple[Any, ...]:
        attributes = real.CUdevice_attribute
        return OK, {
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.sm // 10,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.sm % 10,
            attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
        }[which]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return OK, "context"

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any, ...]:
        self._current.context = context
        return (OK,)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return self._done("cuMemGetInfo", self.free, 2 * self.free)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return self._done("cuCtxSynchronize")

    # ---- memory -----------------------------------------------------------------------------

    def _allocate(self, call: str, kind: str, size_bytes: int) -> tuple[Any, ...]:
        block = ctypes.create_string_buffer(size_bytes + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        result = self._done(call, address)
        if result[0] == OK:
            ctypes.memset(address, 0xCC, size_bytes)  # nobody may rely on zeros
            self._blocks[address] = block
            self.open[kind] += 1
        return result

    def holds(self, address: int) -> bool:
        """Is the address in memory that is allocated now?"""
        return any(start <= address < start + len(block) - 256 for start, block in self._blocks.items())

    def cuMemAlloc(self, size_bytes: int) -> tuple[Any, ...]:
        if size_bytes > self.free:
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        return self._allocate("cuMemAlloc", "memory", size_bytes)

    def cuMemHostAlloc(self, size_bytes: int, flags: int) -> tuple[Any, ...]:
        return self._allocate("cuMemHostAlloc", "pinned", size_bytes)

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        return self._freed("cuMemFree", "memory", address)

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        return self._freed("cuMemFreeHost", "pinned", address)

    def _freed(self, call: str, kind: str, address: int) -> tuple[Any, ...]:
        del self._blocks[address]
        self.open[kind] -= 1
        return self._done(call)

    def cuMemsetD8(self, address: int, value: int, size_bytes: int) -> tuple[Any, ...]:
        ctypes.memset(address, value, size_bytes)
        return self._done("cuMemsetD8")

    def cuMemsetD8Async(self, address: int, value: int, size_bytes: int, stream: int) -> tuple[Any, ...]:
        ctypes.memset(address, value, size_bytes)
        return self._done("cuMemsetD8Async")

    def cuMemcpyHtoDAsync(self, device: int, host: int, size_bytes: int, stream: int) -> tuple[Any, ...]:
        ctypes.memmove(device, host, size_bytes)
        return self._done("cuMemcpyHtoDAsync")

    def cuMemcpyDtoHAsync(self, host: int, device: int, size_bytes: int, stream: int) -> tuple[Any, ...]:
        ctypes.memmove(host, device, size_bytes)
        return self._done("cuMemcpyDtoHAsync")

    def cuMemcpyDtoDAsync(self, to: int, source: int, size_bytes: int, stream: int) -> tuple[Any, ...]:
        ctypes.memmove(to, source, size_bytes)
        return self._done("cuMemcpyDtoDAsync")

    # ---- streams, events, modules -----------------------------------------------------------

    def _made(self, call: str, kind: str) -> tuple[Any, ...]:
        result = self._done(call, next(self._handles))
        self.open[kind] += result[0] == OK
        return result

    def _ended(self, call: str, kind: str) -> tuple[Any, ...]:
        self.open[kind] -= 1
        return self._done(call)

    def cuStreamCreate(self, flags: Any) -> tuple[Any, ...]:
        return self._made("cuStreamCreate", "stream")

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        return self._ended("cuStreamDestroy", "stream")

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return self._done("cuStreamSynchronize")

    def cuEventCreate(self, flags: Any) -> tuple[Any, ...]:
        return self._made("cuEventCreate", "event")

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        return self._ended("cuEventDestroy", "event")

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        return self._done("cuEventRecord")

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any, ...]:
        self.stream_waits.append((stream, event))
        return self._done("cuStreamWaitEvent")

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        return self._done("cuEventSynchronize")

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Any, ...]:
        assert cubin[:4] == b"\x7fELF"
        return self._made("cuModuleLoadData", "module")

    def cuModuleUnload(self, module: int) -> tuple[Any, ...]:
        return self._ended("cuModuleUnload", "module")

    def cuModuleGetFunction(self, module: int, symbol: bytes) -> tuple[Any, ...]:
        return self._done("cuModuleGetFunction", symbol.decode())

    def cuFuncSetAttribute(self, function: str, which: Any, value: int) -> tuple[Any, ...]:
        return self._done("cuFuncSetAttribute")

    # ---- graphs -----------------------------------------------------------------------------

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any, ...]:
        assert self._recording is None
        self._recording = []
        return self._done("cuStreamBeginCapture")

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        before, self.capture_mode = self.capture_mode, mode
        return self._done("cuThreadExchangeStreamCaptureMode", before)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        """The last node of a capture is its place among the launches."""
        states = real.CUstreamCaptureStatus
        if self._recording is None:
            return self._done("cuStreamGetCaptureInfo", states.CU_STREAM_CAPTURE_STATUS_NONE, 0, 0, [], [], 0)
        last = [len(self._recording) - 1] if self._recording else []
        active = states.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return self._done("cuStreamGetCaptureInfo", active, 1, 0, last, [], len(last))

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        assert self._recording is not None
        kernel = real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        return self._done("cuGraphNodeGetType", self.node_types.get(self._recording[node].symbol, kernel))

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        result = self._made("cuStreamEndCapture", "graph")
        assert self._recording is not None
        self._graphs[result[1]], self._recording = self._recording, None
        return result

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        result = self._made("cuGraphInstantiate", "exec")
        self._graphs[result[1]] = self._graphs[graph]
        return result

    def cuGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        return self._ended("cuGraphDestroy", "graph")

    def cuGraphExecDestroy(self, graph: int) -> tuple[Any, ...]:
        return self._ended("cuGraphExecDestroy", "exec")

    def cuLaunchKernelEx(self, config: Any, function: str, params: Any, extra: int) -> tuple[Any, ...]:
        assert self._recording is not None, "a kernel was launched outside a graph"
        grid, (values, types) = (config.gridDimX, config.gridDimY, config.gridDimZ), params
        overlap = config.numAttrs > 0
        self._recording.append(
            Launched(function, grid, config.blockDimX, config.sharedMemBytes, values, types, overlap)
        )
        return self._done("cuLaunchKernelEx")

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Any, ...]:
        result = self._done("cuGraphLaunch")
        if result[0] == OK:
            self.graph_launches += 1
            for launched in self._graphs[graph]:
                self.launched.append(launched)
                self.on_launch(launched)
        return result
