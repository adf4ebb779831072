"""The process that builds segments: `python -m tapeout.compiler.tensorrt.worker FOLDER`.

A process of its own, because which of its packages polygraphy drives is settled once in a process, the
builder's memory goes with it, and a library that ends its process ends only this one.

FOLDER holds `request.json` and `NAME.onnx` for each segment; it gets `NAME.plan` and `result.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tapeout.compiler.tensorrt.builder import build_segment
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.codec import decode
from tapeout.runtime.engine.launches import SegmentProfile
from tapeout.runtime.tensorrt.package import load

REQUEST, RESULT = "request.json", "result.json"


def work(folder: Path) -> None:
    """Build what the request asks for; an error of ours is part of the result."""
    request = json.loads((folder / REQUEST).read_text())
    result: dict[str, object] = {}
    try:
        package = load(request["package"])
        cache = request["timing_cache"]
        built = {}
        for name, profiles in request["segments"].items():
            segment = build_segment(
                package,
                (folder / f"{name}.onnx").read_bytes(),
                [decode(SegmentProfile, profile, "profile") for profile in profiles],
                request["sm"],
                None if cache is None else Path(cache),
            )
            (folder / f"{name}.plan").write_bytes(segment.plan)
            built[name] = {"layers": segment.layers, "seconds": segment.seconds}
        result = {"segments": built}
    except TapeoutError as error:
        result = {"error": error.message, "hint": error.hint, "kind": type(error).__name__}
    (folder / RESULT).write_text(json.dumps(result))


if __name__ == "__main__":
    work(Path(sys.argv[1]))
