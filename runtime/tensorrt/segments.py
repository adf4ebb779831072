"""Segments of an engine in TensorRT: deserialized once, one execution context for each profile.

Contexts own no memory: they work in what the executor gives them, one after the other. A call sets addresses
and shapes and queues; while the stream is captured it becomes nodes of the step's graph.

Has been tested with a stand-in for the package only: nothing of it has been executed on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tapeout.plugins.errors import EngineIncompatibleError, TapeoutError
from tapeout.runtime.engine.launches import Segment, SegmentTensor
from tapeout.runtime.tensorrt.package import KINDS, Package, installed_version, load

logger = logging.getLogger("tapeout")

#: Alignment that TensorRT wants of the addresses it gets, in bytes.
ADDRESS_ALIGNMENT = 256


def check_package(segments: Sequence[Segment], whose: str = "the engine's segments are") -> None:
    """Is the package installed that these segments are for? Nothing is imported.

    A serialized engine is read by the very version that wrote it. `whose` begins the error.

    Raises EngineIncompatibleError, which names both versions.
    """
    for name, version in sorted({(s.package, s.version) for s in segments}):
        if name not in KINDS:
            raise EngineIncompatibleError(
                f"{whose} for {name!r}, expected one of {', '.join(KINDS)}",
                hint="build the engine again with this version: tapeout build",
            )
        kind, found = KINDS[name], installed_version(name)
        if found != version:
            have = "which is not installed" if found is None else f"this machine has {found}"
            distribution = kind.distributions[0].removesuffix("-bindings")
            raise EngineIncompatibleError(
                f"{whose} for {kind.title} {version}, {have}",
                hint=f"pip install '{distribution}=={version}', or build the engine with --tactics native",
            )


class LoadedSegments:
    """The segments in the current CUDA context, freed by `close`.

    Raises EngineIncompatibleError where TensorRT refuses one on this GPU.
    """

    def __init__(self, segments: Sequence[Segment], blob: Callable[[str], bytes]) -> None:
        check_package(segments)
        self._segments = tuple(segments)
        names = {segment.package for segment in segments}
        if len(names) != 1:
            raise EngineIncompatibleError(
                f"the engine's segments are for {sorted(names)}, expected one package"
            )
        self._package = load(names.pop())
        trt = self._package.module
        self._logger = _logger(self._package)
        self._runtime = trt.Runtime(self._logger)
        self._engines = [self._deserialized(segment, blob(segment.blob)) for segment in segments]
        self._contexts = [
            [self._context(engine, segment, p) for p in range(len(segment.profiles))]
            for engine, segment in zip(self._engines, segments, strict=True)
        ]

    @property
    def title(self) -> str:
        """The package, for people."""
        return self._package.title

    @property
    def memory_bytes(self) -> int:
        """What the hungriest context wants beside its inputs and outputs."""
        return max(
            int(engine.get_device_memory_size_for_profile_v2(profile))
            for engine, segment in zip(self._engines, self._segments, strict=True)
            for profile in range(len(segment.profiles))
        )

    def place(self, address: int, size_bytes: int, stream: int) -> None:
        """Give the contexts the memory they work in, of `memory_bytes` or more, and choose their profiles.

        Contexts never run side by side, so all share it.
        """
        for segment, contexts in zip(self._segments, self._contexts, strict=True):
            for profile, context in enumerate(contexts):
                context.set_device_memory(address, size_bytes)
                self._done(
                    context.set_optimization_profile_async(profile, stream), segment, f"profile {profile}"
                )

    def enqueue(
        self,
        index: int,
        profile: int,
        rows: Mapping[str, int],
        addresses: Sequence[int],
        stream: int,
    ) -> None:
        """Queue segment `index` with one of its profiles.

        Args:
            rows: padded row counts by symbol.
            addresses: of its inputs, weights and outputs, in this order, multiples of ADDRESS_ALIGNMENT.
            stream: the driver's handle.
        """
        segment, context = self._segments[index], self._contexts[index][profile]
        tensors = (*segment.inputs, *segment.weights, *segment.outputs)
        for tensor, address in zip(tensors, addresses, strict=True):
            what = f"address {address:#x} of {tensor.name}"
            self._done(context.set_tensor_address(tensor.name, address), segment, what)
        for tensor in segment.inputs:
            shape = bound_shape(tensor, rows)
            self._done(
                context.set_input_shape(tensor.name, shape), segment, f"shape {list(shape)} of {tensor.name}"
            )
        self._done(context.execute_async_v3(stream), segment, f"queueing it at {dict(rows)} rows")

    def close(self) -> None:
        """Contexts first: they refer to engines, engines to the runtime."""
        self._contexts.clear()
        self._engines.clear()
        self._runtime = None

    def _deserialized(self, segment: Segment, data: bytes) -> Any:
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise EngineIncompatibleError(
                f"{self._package.title} refuses segment {segment.blob} on this GPU{self._reason()}",
                hint="build the engine for this GPU, or with --tactics native",
            )
        return engine

    def _context(self, engine: Any, segment: Segment, profile: int) -> Any:
        trt = self._package.module
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        # RTX compiles kernels where it runs. A graph holds what a call queued, so the kernels that fit the
        # shape have to be there when it is captured, not some time later.
        if (strategies := getattr(trt, "DynamicShapesKernelSpecializationStrategy", None)) is not None:
            config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
        context = engine.create_execution_context(config)
        if context is None:
            raise EngineIncompatibleError(
                f"{self._package.title} gives no context for profile {profile} of segment {segment.blob}"
                f"{self._reason()}",
                hint="build the engine with --tactics native",
            )
        return context

    def _done(self, succeeded: bool, segment: Segment, doing: str) -> None:
        if not succeeded:
            raise TapeoutError(
                f"{self._package.title}, segment {segment.blob}: {doing} failed{self._reason()}"
            )

    def _reason(self) -> str:
        """What the package said last, for the end of a message; "" when it said nothing."""
        return "".join(f": {line}" for line in self._logger.last_errors[-1:])


def bound_shape(tensor: SegmentTensor, rows: Mapping[str, int]) -> tuple[int, ...]:
    """The tensor's shape with symbols replaced."""
    return tuple(rows[d] if isinstance(d, str) else d for d in tensor.shape)


def segment_bytes(segments: Sequence[Segment], blob: Callable[[str], bytes]) -> int:
    """Memory that the segments want in the current context; they are loaded to be asked."""
    loaded = LoadedSegments(segments, blob)
    try:
        return loaded.memory_bytes
    finally:
        loaded.close()


def _logger(package: Package) -> Any:
    """A logger of the package's that writes to ours, and keeps errors for messages."""
    base = package.module.ILogger
    levels = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}

    class PythonLogger(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.last_errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity.name, logging.DEBUG)
            if level == logging.ERROR:
                self.last_errors.append(" ".join(message.split()))
            logger.log(level, "%s: %s", package.title, message)

    return PythonLogger()
