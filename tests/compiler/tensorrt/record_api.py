"""Writes `api_surface.json`: names that bindings of TensorRT have, from the real wheels over stub libraries.

    python record_api.py WHEEL...        (wheels of tensorrt-cu13-bindings, tensorrt-rtx-cu13-bindings)

The bindings are extension modules that want libnvinfer and its like, half a gigabyte that nobody needs to ask
what they have. Stubs with the handful of functions that they import stand in. Needs a C compiler; run by hand
when a version is added, for the interpreter that the wheels are for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: What of the bindings the adapter uses.
CLASSES = (
    "Builder", "IBuilderConfig", "ICudaEngine", "IExecutionContext", "ILogger", "INetworkDefinition",
    "IOptimizationProfile", "IRuntimeConfig", "OnnxParser", "Runtime",
)  # fmt: skip
ENUMS = (
    "BuilderFlag", "ComputeCapability", "DynamicShapesKernelSpecializationStrategy",
    "ExecutionContextAllocationStrategy", "MemoryPoolType", "NetworkDefinitionCreationFlag",
)  # fmt: skip
_IMPORTED = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry",
    "getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins",
)  # fmt: skip
_ASK = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
classes, enums = json.loads(sys.argv[2]), json.loads(sys.argv[3])
public = lambda value: sorted(n for n in dir(value) if not n.startswith("_"))
print(json.dumps({
    "version": module.__version__,
    "classes": {n: public(getattr(module, n)) for n in classes if hasattr(module, n)},
    "enums": {n: sorted(getattr(module, n).__members__) for n in enums if hasattr(module, n)},
}))
"""


def surface(wheel: Path) -> dict[str, object]:
    """What the bindings of a wheel have."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        (module,) = (p.name for p in folder.iterdir() if p.name.endswith("_bindings"))
        (library,) = (folder / module).glob("*.so")
        needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        stubs = folder / "stubs"
        stubs.mkdir()
        source = folder / "stub.c"
        source.write_text("".join(f"void* {function}(void) {{ return 0; }}\n" for function in _IMPORTED))
        for line in needed.splitlines():
            wanted = line.rpartition("[")[2].rstrip("]")
            if "NEEDED" in line and ("nvinfer" in wanted or "nvonnx" in wanted or "tensorrt" in wanted):
                target = stubs / wanted
                command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{wanted}", "-o", target, source]
                subprocess.run(command, check=True)
        paths = {"LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": str(folder)}
        command = [sys.executable, "-c", _ASK, module, json.dumps(CLASSES), json.dumps(ENUMS)]
        done = subprocess.run(
            command, env={**os.environ, **paths}, capture_output=True, text=True, check=True
        )
        return {"package": module.removesuffix("_bindings"), **json.loads(done.stdout)}


def main() -> None:
    found = [surface(Path(wheel)) for wheel in sys.argv[1:]]
    path = Path(__file__).with_name("api_surface.json")
    path.write_text(json.dumps(found, separators=(",", ":")).replace('{"package"', '\n{"package"') + "\n")


if __name__ == "__main__":
    main()
