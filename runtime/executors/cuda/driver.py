"""The CUDA driver through cuda-bindings: errors as exceptions, a device, memory, modules.

Nothing here knows engines. Importing it imports cuda-bindings (0.05 s); the driver itself is
loaded by `open_device`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tapeout.plugins.errors import CapacityError, EngineIncompatibleError, TapeoutError
from tapeout.runtime.engine.target import GpuFacts

_OUT_OF_MEMORY = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
#: What a driver says about kernels that it, or this GPU, cannot take.
_NOT_OUR_KERNELS = {
    cu.CUresult.CUDA_ERROR_INVALID_IMAGE,
    cu.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU,
    cu.CUresult.CUDA_ERROR_INVALID_PTX,
    cu.CUresult.CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    cu.CUresult.CUDA_ERROR_NOT_FOUND,  # no kernel of that name
}


def check(result: tuple[Any, ...], doing: str) -> Any:
    """The values of a driver call's result tuple; raises TapeoutError saying what was being done."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        text = cu.cuGetErrorString(status)[1]
        message = f"CUDA: {doing}: {status.name} ({text.decode() if text else 'unknown'})"
        if status in _NOT_OUR_KERNELS:
            raise EngineIncompatibleError(message, hint="build the engine again for this GPU and driver")
        raise CapacityError(message) if status == _OUT_OF_MEMORY else TapeoutError(message)
    return values[0] if len(values) == 1 else tuple(values) if values else None


class Device:
    """A GPU with its primary context, current on the thread that opened it. See `open_device`."""

    def __init__(self, ordinal: int) -> None:
        try:
            check(cu.cuInit(0), "initializing the driver")
            self._device = check(cu.cuDeviceGet(ordinal), f"opening GPU {ordinal}")
        except (RuntimeError, TapeoutError) as error:  # cuda-bindings raises where there is no driver
            raise EngineIncompatibleError(
                f"no usable NVIDIA GPU: {error}",
                hint="a cuda engine needs a GPU and its driver; nvidia-smi shows both",
            ) from error
        self.facts = self._facts()
        self._context: Any = None

    def make_current(self) -> None:
        """Bind the context to the calling thread; every thread that calls the driver needs it.

        The context is made on first use, so that a GPU can be looked at without the memory it takes.
        """
        if self._context is None:
            self._context = check(cu.cuDevicePrimaryCtxRetain(self._device), "creating a context")
        check(cu.cuCtxSetCurrent(self._context), "making the context current")

    def wait(self) -> None:
        """Until all that was queued on the device has run, on whatever stream."""
        check(cu.cuCtxSynchronize(), "waiting for the device")

    def free_bytes(self) -> int:
        """Device memory not in use by anybody."""
        free, _ = check(cu.cuMemGetInfo(), "asking for free memory")
        return int(free)

    def _facts(self) -> GpuFacts:
        attributes = cu.CUdevice_attribute

        def attribute(which: Any) -> int:
            return int(check(cu.cuDeviceGetAttribute(which, self._device), "reading device attributes"))

        major = attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        name = check(cu.cuDeviceGetName(128, self._device), "reading the device's name")
        return GpuFacts(
            name.split(b"\0")[0].decode(),
            10 * major + minor,
            attribute(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            int(check(cu.cuDeviceTotalMem(self._device), "reading the device's memory")),
            int(check(cu.cuDriverGetVersion(), "reading the driver's version")),
        )


@cache
def open_device(ordinal: int = 0) -> Device:
    """The GPU of that number, opened once a process.

    Its context lives as long as the process: making one takes 0.3 s, and executors share it.

    Raises EngineIncompatibleError where there is no GPU or no driver.
    """
    return Device(ordinal)


class DeviceMemory:
    """One allocation, freed by `close`."""

    def __init__(self, size_bytes: int, what: str) -> None:
        self.size_bytes = size_bytes
        self.address = int(
            check(cu.cuMemAlloc(max(size_bytes, 256)), f"allocating {size_bytes:,} bytes for {what}")
        )

    def zero(self) -> None:
        check(cu.cuMemsetD8(self.address, 0, max(self.size_bytes, 256)), "clearing memory")

    def close(self) -> None:
        if self.address:
            cu.cuMemFree(self.address)
            self.address = 0


class PinnedMemory:
    """Page-locked host memory as a numpy byte array, freed by `close`."""

    def __init__(self, size_bytes: int) -> None:
        self.address = int(check(cu.cuMemHostAlloc(size_bytes, 0), f"pinning {size_bytes:,} bytes"))
        buffer = (ctypes.c_uint8 * size_bytes).from_address(self.address)
        self.array: np.ndarray = np.ctypeslib.as_array(buffer)

    def close(self) -> None:
        if self.address:
            cu.cuMemFreeHost(self.address)
            self.address = 0


class Stream:
    """A non-blocking stream.

    whole_before_next: the next launch waits for all that was queued (see `launch`). So it has to be behind a
        library's call whose last node is no kernel.
    """

    def __init__(self) -> None:
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = check(cu.cuStreamCreate(flags), "creating a stream")
        self.whole_before_next = False

    def upload(self, device: int, host: int, size_bytes: int) -> None:
        check(cu.cuMemcpyHtoDAsync(device, host, size_bytes, self.handle), "copying to the device")

    def download(self, host: int, device: int, size_bytes: int) -> None:
        check(cu.cuMemcpyDtoHAsync(host, device, size_bytes, self.handle), "copying from the device")

    def copy(self, to: int, source: int, size_bytes: int) -> None:
        check(cu.cuMemcpyDtoDAsync(to, source, size_bytes, self.handle), "copying on the device")

    def zero(self, device: int, size_bytes: int) -> None:
        self.fill(device, 0, size_bytes)

    def fill(self, device: int, byte: int, size_bytes: int) -> None:
        check(cu.cuMemsetD8Async(device, byte, size_bytes, self.handle), "clearing memory")

    def wait_for(self, event: Event) -> None:
        """Let what is queued from now on begin after the event; the host does not wait."""
        check(cu.cuStreamWaitEvent(self.handle, event.handle, 0), "ordering two streams")

    def ends_with_kernel(self) -> bool:
        """Whether the stream is captured and ends with one kernel, whoever launched it."""
        state, _, _, nodes, *_ = check(cu.cuStreamGetCaptureInfo(self.handle), "asking what was captured")
        if state != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE or len(nodes) != 1:
            return False
        kind = check(cu.cuGraphNodeGetType(nodes[0]), "asking what was captured")
        return bool(kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL)

    def wait(self) -> None:
        check(cu.cuStreamSynchronize(self.handle), "waiting for the device")

    def close(self) -> None:
        cu.cuStreamDestroy(self.handle)


class Event:
    """A point in a stream that the host can wait for."""

    def __init__(self) -> None:
        flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.handle = check(cu.cuEventCreate(flags), "creating an event")

    def record(self, stream: Stream) -> None:
        check(cu.cuEventRecord(self.handle, stream.handle), "recording an event")

    def wait(self) -> None:
        check(cu.cuEventSynchronize(self.handle), "waiting for a step")

    def close(self) -> None:
        cu.cuEventDestroy(self.handle)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """What capturing forbids is allowed on this thread: libraries load kernels on first use."""
    doing = "changing what capturing forbids"
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(cu.cuThreadExchangeStreamCaptureMode(relaxed), doing)
    try:
        yield
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(before), doing)


class Function:
    """A kernel of a cubin, allowed to use the dynamic shared memory it was compiled for.

    prefers_l1: a multiprocessor's memory goes to the cache while the kernel runs. Else the driver divides
    it, and leaves it as it was for the kernel before where that will do.
    """

    def __init__(self, cubin: bytes, symbol: str, shared_bytes: int, *, prefers_l1: bool = False) -> None:
        self._module = check(cu.cuModuleLoadData(cubin), f"loading kernel {symbol}")
        try:
            self.handle = check(
                cu.cuModuleGetFunction(self._module, symbol.encode()), f"finding kernel {symbol}"
            )
            attributes = cu.CUfunction_attribute
            if shared_bytes > 48 << 10:
                attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                result = cu.cuFuncSetAttribute(self.handle, attribute, shared_bytes)
                check(result, f"giving {symbol} shared memory")
            if prefers_l1:
                attribute = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                check(cu.cuFuncSetAttribute(self.handle, attribute, 0), f"giving {symbol} the cache")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        cu.cuModuleUnload(self._module)


def launch(
    function: Function,
    grid: tuple[int, int, int],
    threads: int,
    shared: int,
    stream: Stream,
    values: Sequence[int | float],
    types: Sequence[type],
    *,
    overlap: bool = False,
    cluster: int = 1,
) -> None:
    """One kernel launch, or one node while a stream is captured.

    grid: programs. cluster: blocks a program is. overlap: blocks may start before the launch ahead has
    ended (programmatic dependent launch), unless the stream's next launch waits for everything: such an edge
    is one between kernels. The one ahead may be a library's: this one waits for its end by itself.
    """
    overlap, stream.whole_before_next = overlap and not stream.whole_before_next, False
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.gridDimX *= cluster
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, stream.handle
    attributes = [_overlap_attribute()] if overlap else []
    attributes += [_cluster_attribute(cluster)] if cluster > 1 else []
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    params = (tuple(values), tuple(types))
    check(cu.cuLaunchKernelEx(config, function.handle, params, 0), "launching a kernel")


@cache
def _overlap_attribute() -> Any:
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


@cache
def _cluster_attribute(size: int) -> Any:
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = attribute.value.clusterDim
    dimension.x, dimension.y, dimension.z = size, 1, 1
    return attribute
