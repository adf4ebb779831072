"""One segment: an ONNX model of a region into a serialized engine, by polygraphy's loaders.

What differs between TensorRT 10, 11 and TensorRT-RTX on the builder's side is here and nowhere else. Networks
are strongly typed, which only 11 makes the sole way; flags of precision, calibrators and explicit batch,
which 11 has no more, are never set. Enum members are looked up by name, since 11 counts them otherwise.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.plugins.errors import TapeoutError, UnsupportedError
from tapeout.runtime.engine.launches import SegmentProfile
from tapeout.runtime.tensorrt.package import RTX, Package

#: Raised when what is asked of a builder below changes: segments that were kept are built again then.
SETTINGS_VERSION = 1
#: What a layer may take beside its tensors. Bounded, so that an engine does not depend on the builder's GPU.
WORKSPACE_BYTES = 32 << 20
_LAYER = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<kind>\w+),")


@dataclass(frozen=True)
class Built:
    """A segment as its builder made it: the engine, its layers as "type name", and how long it took."""

    plan: bytes
    layers: tuple[str, ...]
    seconds: float


def build_segment(
    package: Package,
    model: bytes,
    profiles: Sequence[SegmentProfile],
    sm: int,
    timing_cache: Path | None = None,
) -> Built:
    """Build one segment.

    polygraphy serves one package in a process: which, is settled by the first call.

    Args:
        model: the serialized ONNX model; leading dimensions are symbols of the profiles.
        sm: compute capability the engine is for; full TensorRT builds for the GPU it finds.
        timing_cache: full TensorRT's own: read where it is, and added to.

    Raises:
        UnsupportedError: this version of the package cannot build for `sm`.
        TapeoutError: the builder refused, with its last error.
    """
    tools = _polygraphy(package)
    trt = package.module
    is_rtx = package.kind.name == RTX
    if is_rtx and not hasattr(trt.ComputeCapability, f"SM{sm}"):
        known = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
        raise UnsupportedError(
            f"{package.title} does not build for SM{sm}, expected one of {', '.join(known)}",
            hint="build with --tactics native",
        )
    shared: dict[str, Any] = {
        "profiles": [_profile(tools, model, profile) for profile in profiles],
        "memory_pool_limits": {trt.MemoryPoolType.WORKSPACE: WORKSPACE_BYTES},
    }
    if is_rtx:
        config = tools.config_rtx(compute_capabilities=[divmod(sm, 10)], **shared)
    else:
        if timing_cache is not None and timing_cache.exists():
            shared["load_timing_cache"] = str(timing_cache)
        config = tools.trt.CreateConfig(**shared)

    def restricted(builder: Any, network: Any, config: Any) -> None:
        """Products of float32 stay float32 (TF32 has 10 bits), and all runs on the executor's one stream."""
        config.clear_flag(trt.BuilderFlag.TF32)
        config.max_aux_streams = 0

    start = time.perf_counter()
    with _listening(tools.logger) as messages:
        try:
            plan = tools.trt.EngineBytesFromNetwork(
                tools.trt.NetworkFromOnnxBytes(model, strongly_typed=True),
                tools.trt.PostprocessConfig(config, restricted),
                save_timing_cache=None if is_rtx or timing_cache is None else str(timing_cache),
            )()
        except tools.error as error:
            told = [m.removeprefix("[E]").strip() for m in messages if m.startswith("[E]")]
            reason = " ".join((told or [str(error)])[0].split())
            raise TapeoutError(
                f"{package.title} did not build a segment for sm_{sm}: {reason}",
                hint="build with --tactics native; --keep-onnx DIR leaves the ONNX files",
            ) from None
    return Built(bytes(plan), layers_in("\n".join(messages)), time.perf_counter() - start)


def layers_in(log: str) -> tuple[str, ...]:
    """What stands in the `Layers:` block of a builder's verbose log, as "type name".

    The engine itself could tell as much only on a GPU, where alone it can be deserialized.
    """
    _, _, rest = log.partition("Layers:\n")
    lines = rest.partition("I/O Tensors:")[0].splitlines()
    matches = (_LAYER.search(line) for line in lines)
    return tuple(f"{m['kind']} {m['name']}" for m in matches if m)


@dataclass(frozen=True)
class _Tools:
    """polygraphy's modules, set for one package."""

    trt: Any
    config_rtx: Any
    logger: Any
    error: type[Exception]


def _polygraphy(package: Package) -> _Tools:
    from polygraphy import config

    wanted = package.kind.name == RTX
    if "polygraphy.backend.trt" in sys.modules and wanted != config.USE_TENSORRT_RTX:
        raise TapeoutError(f"polygraphy serves another package in this process, expected {package.title}")
    config.USE_TENSORRT_RTX = wanted
    from polygraphy.backend import tensorrt_rtx, trt
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    return _Tools(trt, tensorrt_rtx.CreateConfigRTX, G_LOGGER, PolygraphyException)


def _profile(tools: _Tools, model: bytes, profile: SegmentProfile) -> Any:
    import onnx

    made = tools.trt.Profile()
    for tensor in onnx.load_model_from_string(model).graph.input:
        dims = tensor.type.tensor_type.shape.dim

        def shape(which: str, dims: Any = dims) -> tuple[int, ...]:
            rows: Mapping[str, Any] = profile.rows
            return tuple(getattr(rows[d.dim_param], which) if d.dim_param else d.dim_value for d in dims)

        made.add(tensor.name, min=shape("least"), opt=shape("typical"), max=shape("most"))
    return made


@contextmanager
def _listening(logger: Any) -> Iterator[list[str]]:
    """Everything that polygraphy and the builder say meanwhile; nothing of it is printed."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger.use_python_logging_system = True
    python_logger, collector = logger.python_logger, Collector()
    before = logger.module_severity, python_logger.level, python_logger.propagate
    logger.module_severity = logger.EXTRA_VERBOSE
    python_logger.setLevel(1)
    python_logger.propagate = False
    python_logger.addHandler(collector)
    try:
        yield messages
    finally:
        python_logger.removeHandler(collector)
        logger.module_severity, level, python_logger.propagate = before
        python_logger.setLevel(level)
        logger.use_python_logging_system = False
