"""Builds a segment with TensorRT-RTX and prints every name of its API that the way there touched.

    python traced_build.py MODEL.onnx

In a process of its own: polygraphy binds the package once. Objects of the bindings are wrapped, and unwrapped
where they are passed back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorrt_rtx_bindings as tensorrt_rtx
from record_api import CLASSES, ENUMS

touched: set[tuple[str, str]] = set()
_WRAPPED = tuple(getattr(tensorrt_rtx, name) for name in CLASSES if name != "ILogger")


def unwrap(value: Any) -> Any:
    if isinstance(value, Traced):
        return object.__getattribute__(value, "real")
    return [unwrap(v) for v in value] if isinstance(value, list) else value


def wrap(value: Any) -> Any:
    return Traced(value, type(value).__name__) if isinstance(value, _WRAPPED) else value


class Traced:
    """An object, class or the module of the bindings; names that are read or set are written down."""

    def __init__(self, real: Any, name: str) -> None:
        object.__setattr__(self, "real", real)
        object.__setattr__(self, "name", name)

    def __getattr__(self, attribute: str) -> Any:
        real, name = object.__getattribute__(self, "real"), object.__getattribute__(self, "name")
        value = getattr(real, attribute)
        if name == "module" and attribute in ENUMS:
            return Traced(value, attribute)
        if name == "module" and attribute in CLASSES and attribute != "ILogger":
            return lambda *given: wrap(value(*map(unwrap, given)))
        if name in (*CLASSES, *ENUMS) and not attribute.startswith("__"):
            touched.add((name, attribute))
        if callable(value) and name in CLASSES:
            return lambda *given, **named: wrap(
                value(*map(unwrap, given), **{k: unwrap(v) for k, v in named.items()})
            )
        return wrap(value)

    def __setattr__(self, attribute: str, value: Any) -> None:
        touched.add((object.__getattribute__(self, "name"), attribute))
        setattr(object.__getattribute__(self, "real"), attribute, unwrap(value))

    def __getitem__(self, index: int) -> Any:
        return wrap(object.__getattribute__(self, "real")[index])


def main() -> None:
    module: Any = Traced(tensorrt_rtx, "module")
    sys.modules["tensorrt_rtx"] = module
    from tapeout.compiler.tensorrt.builder import build_segment
    from tapeout.runtime.engine.launches import RowRange, SegmentProfile
    from tapeout.runtime.tensorrt.package import KINDS, RTX, Package

    profiles = [SegmentProfile({"T": RowRange(1, 2, 4)}), SegmentProfile({"T": RowRange(5, 8, 8)})]
    package = Package(KINDS[RTX], tensorrt_rtx.__version__, module)
    built = build_segment(package, Path(sys.argv[1]).read_bytes(), profiles, 89)
    told = {"bytes": len(built.plan), "touched": sorted(touched)}
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
