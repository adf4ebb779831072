"""What timing needs of the driver beyond replaying engines: fills, graphs of anything, timed events."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from types import TracebackType

import numpy as np
from cuda.bindings import driver as cu

from tapeout.runtime.engine.launches import Kernel, Launch, Matmul
from tapeout.runtime.executors.cuda.cublaslt import CublasLt, find_library
from tapeout.runtime.executors.cuda.driver import DeviceMemory, Function, Stream, check, launch

#: Of the global scratch that Triton's kernels ask for, as in engines.
SCRATCH_ALIGNMENT = 256


def l2_bytes(ordinal: int) -> int:
    """Size of the device's L2 cache."""
    which = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    device = check(cu.cuDeviceGet(ordinal), f"opening GPU {ordinal}")
    return int(check(cu.cuDeviceGetAttribute(which, device), "reading the size of the L2 cache"))


class Memory:
    """Allocations that end together; fills and copies among them. A context manager."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._stack = stream, ExitStack()
        self._hosts: list[np.ndarray] = []

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def allocate(self, size_bytes: int, what: str) -> int:
        """The address of new memory, at a multiple of 256."""
        memory = self._stack.enter_context(closing(DeviceMemory(size_bytes, what)))
        return memory.address

    def upload(self, values: np.ndarray, what: str) -> int:
        """New memory that holds `values`; there once the stream has come so far."""
        host = np.ascontiguousarray(values)
        address = self.allocate(host.nbytes, what)
        self._hosts.append(host)  # pageable memory is read before the copy returns; this costs nothing
        self._stream.upload(address, host.ctypes.data, host.nbytes)
        return address

    def download(self, address: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """A copy of device memory; waits for all that was queued."""
        host = np.empty(tuple(shape), dtype)
        self._stream.download(host.ctypes.data, address, host.nbytes)
        self._stream.wait()
        return host


def fill_words(address: int, word: int, size_bytes: int, stream: Stream) -> None:
    """Queue filling memory with a 32-bit word; `size_bytes` is rounded down to whole words."""
    check(cu.cuMemsetD32Async(address, word, size_bytes // 4, stream.handle), "filling memory")


class Graph:
    """Launches captured once, to be replayed."""

    def __init__(self, stream: Stream, launches: Callable[[], None]) -> None:
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(stream.handle, mode), "starting a capture")
        try:
            launches()
        except BaseException:
            # Unchecked: the error to tell is the one that is on its way.
            status, graph = cu.cuStreamEndCapture(stream.handle)
            if status == cu.CUresult.CUDA_SUCCESS:
                cu.cuGraphDestroy(graph)
            raise
        graph = check(cu.cuStreamEndCapture(stream.handle), "ending a capture")
        try:
            self._exec = check(cu.cuGraphInstantiate(graph, 0), "instantiating a graph")
        finally:
            cu.cuGraphDestroy(graph)
        self._stream = stream

    def replay(self) -> None:
        check(cu.cuGraphLaunch(self._exec, self._stream.handle), "launching a graph")

    def close(self) -> None:
        cu.cuGraphExecDestroy(self._exec)


class TimedEvents:
    """Pairs of events around pieces of a stream."""

    def __init__(self, pairs: int) -> None:
        flags = cu.CUevent_flags.CU_EVENT_DEFAULT
        self._events = [check(cu.cuEventCreate(flags), "creating an event") for _ in range(2 * pairs)]

    def around(self, index: int, work: Callable[[], None], stream: Stream) -> None:
        """Queue `work` between the events of pair `index`."""
        check(cu.cuEventRecord(self._events[2 * index], stream.handle), "recording an event")
        work()
        check(cu.cuEventRecord(self._events[2 * index + 1], stream.handle), "recording an event")

    def elapsed_us(self, index: int) -> float:
        """Microseconds between the events of a pair; waits for the second."""
        first, second = self._events[2 * index : 2 * index + 2]
        check(cu.cuEventSynchronize(second), "waiting for a replay")
        return 1e3 * float(check(cu.cuEventElapsedTime(first, second), "reading a time"))

    def close(self) -> None:
        for event in self._events:
            cu.cuEventDestroy(event)


def is_alive() -> bool:
    """Does the context still work? After an illegal access it never does again."""
    (status,) = cu.cuCtxSynchronize()
    return bool(status == cu.CUresult.CUDA_SUCCESS)


class Kernels:
    """The pack's kernels, loaded when first launched."""

    def __init__(self, table: Sequence[Kernel], cubins: Callable[[str], bytes], stream: Stream) -> None:
        self._table, self._cubins, self._stream = table, cubins, stream
        self._functions: dict[int, Function] = {}

    def scratch_bytes(self, index: int, programs: int) -> int:
        """Global scratch that a launch of so many programs wants."""
        kernel = self._table[index]
        return kernel.scratch_bytes * kernel.blocks(programs)

    def launch(
        self,
        index: int,
        grid: tuple[int, int, int],
        values: Sequence[int | float],
        types: Sequence[type],
        scratch: int = 0,
    ) -> None:
        """Queue a launch; `values` are the kernel's own arguments."""
        self.load(index)
        kernel = self._table[index]
        pointers = [scratch if i == 0 and kernel.scratch_bytes else 0 for i in range(kernel.scratch_pointers)]
        launch(
            self._functions[index], grid, kernel.threads, kernel.shared_bytes, self._stream,
            [*values, *pointers], [*types, *(ctypes.c_void_p for _ in pointers)], overlap=kernel.overlap,
            cluster=kernel.cluster,
        )  # fmt: skip

    def load(self, index: int) -> None:
        """Load a kernel now: loading is not allowed while a stream is captured."""
        if index not in self._functions:
            kernel = self._table[index]
            cubin = self._cubins(kernel.blob)
            self._functions[index] = Function(
                cubin, kernel.symbol, kernel.shared_bytes, prefers_l1=kernel.prefers_l1
            )

    def load_all(self, launches: Iterable[Launch | Matmul]) -> None:
        """Load the kernels of launches now."""
        for item in launches:
            if isinstance(item, Launch):
                self.load(item.kernel)

    def close(self) -> None:
        for function in self._functions.values():
            function.close()
        self._functions.clear()


class Products:
    """The library of products, loaded when first needed."""

    def __init__(self) -> None:
        self._library: CublasLt | None = None

    def library(self) -> CublasLt:
        """Raises EngineIncompatibleError where it is not found or does not start, CapacityError."""
        if self._library is None:
            self._library = CublasLt(find_library())
        return self._library

    def close(self) -> None:
        if self._library is not None:
            self._library.close()
            self._library = None
