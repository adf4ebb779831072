"""A TensorRT package that runs on the host, beside the driver of fake_cuda.py.

A serialized engine is an ONNX model; ONNX Runtime computes what a queued call means when its graph is
replayed, on the memory that the call was given. It has only what the runtime calls,
so that another call is a fault.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from fake_cuda import FakeCuda, Launched

SYMBOL = "segment"
_TYPES = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.INT32: np.int32}


class Severity(Enum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class Allocation(Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class Specialization(Enum):
    LAZY, EAGER, NONE = range(3)


class ILogger:
    """As the package's: a subclass has `log`."""


@dataclass
class Call:
    """A call of `execute_async_v3`, as it was when it was queued."""

    engine: Engine
    profile: int
    shapes: dict[str, tuple[int, ...]]
    addresses: dict[str, int]
    stream: int


class FakeTensorRt:
    """The package. `calls` are those of captures, `outside` the others; `memory_bytes` what contexts want."""

    def __init__(self, cuda: FakeCuda, *, memory_bytes: int = 4096, refuses: bool = False) -> None:
        self.cuda, self.memory_bytes, self.refuses = cuda, memory_bytes, refuses
        self.calls: list[Call] = []
        self.outside: list[Call] = []
        self.deserialized = 0
        self.module = SimpleNamespace(
            ILogger=ILogger,
            Runtime=lambda logger: Runtime(self, logger),
            ExecutionContextAllocationStrategy=Allocation,
            DynamicShapesKernelSpecializationStrategy=Specialization,
        )

    def queued(self, call: Call) -> None:
        """Told of every call when it is queued; a test may do something else."""

    def run(self, launched: Launched) -> Call:
        """What the GPU does when it comes to a call."""
        call = self.calls[int(launched.values[0])]
        feeds = {i.name: _array(call, i.name, i.type.tensor_type.elem_type) for i in call.engine.graph.input}
        names = [o.name for o in call.engine.graph.output]
        rows = {
            d.dim_param: size
            for i in call.engine.graph.input
            for d, size in zip(i.type.tensor_type.shape.dim, call.shapes[i.name], strict=True)
            if d.dim_param
        }
        for output, values in zip(
            call.engine.graph.output, call.engine.session.run(names, feeds), strict=True
        ):
            expected = tuple(rows.get(d.dim_param, d.dim_value) for d in output.type.tensor_type.shape.dim)
            assert values.shape == expected
            ctypes.memmove(call.addresses[output.name], values.tobytes(), values.nbytes)
        return call


def _array(call: Call, name: str, kind: int) -> np.ndarray:
    dtype, shape = np.dtype(_TYPES[kind]), call.shapes[name]
    size = int(np.prod(shape)) * dtype.itemsize
    return (
        np.frombuffer((ctypes.c_char * size).from_address(call.addresses[name]), dtype).reshape(shape).copy()
    )


class Runtime:
    def __init__(self, fake: FakeTensorRt, logger: Any) -> None:
        assert isinstance(logger, ILogger)
        self._fake, self._logger = fake, logger

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        if self._fake.refuses:
            self._logger.log(
                Severity.ERROR, "IRuntime::deserializeCudaEngine: Error Code 6:\n made up by a test"
            )
            return None
        self._fake.deserialized += 1
        return Engine(self._fake, data)


class Engine:
    def __init__(self, fake: FakeTensorRt, data: bytes) -> None:
        import onnxruntime

        self.fake, self.graph = fake, onnx.ModelProto.FromString(data).graph
        self.session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return self.fake.memory_bytes + profile

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(allocation=Allocation.STATIC)
        config.set_execution_context_allocation_strategy = lambda kind: setattr(config, "allocation", kind)
        return config

    def create_execution_context(self, config: Any) -> Context:
        assert config.allocation is Allocation.USER_MANAGED
        assert config.dynamic_shapes_kernel_specialization_strategy is Specialization.EAGER
        return Context(self)


class Context:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._memory, self._profile = engine, (0, 0), -1
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {
            i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim)
            for i in engine.graph.input
            if not any(d.dim_param for d in i.type.tensor_type.shape.dim)
        }

    def set_device_memory(self, address: int, size: int) -> None:
        self._memory = (address, size)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert self._engine.fake.cuda._recording is None, "a profile is chosen outside of captures"
        self._profile = profile
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        known = {t.name for t in (*self._engine.graph.input, *self._engine.graph.output)}
        self._addresses[name] = address
        return name in known and address % 256 == 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        before, self._shapes[name] = self._shapes.get(name), tuple(shape)
        # A shape that changes inside of a capture would be worked out by work that the capture keeps out.
        return self._engine.fake.cuda._recording is None or before == tuple(shape)

    def execute_async_v3(self, stream: int) -> bool:
        fake = self._engine.fake
        address, size = self._memory
        assert size >= self._engine.get_device_memory_size_for_profile_v2(self._profile) > 0
        assert fake.cuda.holds(address)
        assert fake.cuda.holds(address + size - 1)
        call = Call(self._engine, self._profile, dict(self._shapes), dict(self._addresses), stream)
        fake.queued(call)
        if fake.cuda._recording is None:
            fake.outside.append(call)
        else:
            fake.cuda._recording.append(Launched(SYMBOL, (1, 1, 1), 1, 0, (len(fake.calls),), (int,), False))
            fake.calls.append(call)
        return True
