"""What the adapter calls exists in the bindings of TensorRT 10.13, 10.16, 11.0, 11.4 and TensorRT-RTX.

Full TensorRT is not installed where these tests run, and it builds nothing without a GPU. Its bindings alone
are small, and what they have was written down from the wheels themselves (`record_api.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from record_api import CLASSES, ENUMS
from region_reference import Lowered

from tapeout.compiler.cuda_plan import ROW_MULTIPLE
from tapeout.compiler.regions import distinct_bodies, find_regions
from tapeout.compiler.tensorrt.region_onnx import region_onnx
from tapeout.runtime.tensorrt.package import RTX

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "runtime" / "executors"))

SURFACES: list[dict[str, Any]] = json.loads((HERE / "api_surface.json").read_text())
#: What only TensorRT-RTX has: engines for GPUs that are not here, kernels compiled where they run.
RTX_ONLY = {"ComputeCapability", "DynamicShapesKernelSpecializationStrategy"}
RTX_CONFIG = {"num_compute_capabilities", "set_compute_capability"}


def test_the_versions_that_were_asked() -> None:
    versions = [(s["package"], ".".join(s["version"].split(".")[:2])) for s in SURFACES]
    assert versions == [
        ("tensorrt", "10.13"), ("tensorrt", "10.16"), ("tensorrt", "11.0"), ("tensorrt", "11.4"),
        ("tensorrt_rtx", "1.7"),
    ]  # fmt: skip
    assert all(set(s["classes"]) == set(CLASSES) for s in SURFACES)
    for surface in SURFACES:
        absent = RTX_ONLY if surface["package"] != RTX else set()
        assert set(surface["enums"]) == set(ENUMS) - absent
    # What made the adapter necessary is seen: the record is not one surface five times.
    assert "EXPLICIT_BATCH" in SURFACES[1]["enums"]["NetworkDefinitionCreationFlag"]
    assert "EXPLICIT_BATCH" not in SURFACES[2]["enums"]["NetworkDefinitionCreationFlag"]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda s: f"{s['package']} {s['version']}")
def test_the_runtime_s_calls(surface: dict[str, Any]) -> None:
    """The stand-in of the runtime's tests has exactly what the runtime calls, and all of it is there."""
    from fake_tensorrt import Allocation, Context, Engine, ILogger, Runtime

    used = {
        "Runtime": Runtime, "ICudaEngine": Engine, "IExecutionContext": Context,
    }  # fmt: skip
    for name, stand_in in used.items():
        public = {n for n in vars(stand_in) if not n.startswith("_")}
        assert public
        assert public <= set(surface["classes"][name])
    assert "set_execution_context_allocation_strategy" in surface["classes"]["IRuntimeConfig"]
    assert {a.name for a in Allocation} == set(surface["enums"]["ExecutionContextAllocationStrategy"])
    assert "log" not in vars(ILogger)  # a subclass brings it
    if surface["package"] == RTX:
        assert "dynamic_shapes_kernel_specialization_strategy" in surface["classes"]["IRuntimeConfig"]
        assert "EAGER" in surface["enums"]["DynamicShapesKernelSpecializationStrategy"]


def test_the_builder_s_calls(lowered: Lowered, rtx: str, tmp_path: Path) -> None:
    """A real build by TensorRT-RTX, watched: all that polygraphy and the adapter touch, the others have."""
    body = next(iter(distinct_bodies(find_regions(lowered("qwen3", "bfloat16"))).values()))
    model = tmp_path / "region.onnx"
    model.write_bytes(region_onnx(body, ROW_MULTIPLE).SerializeToString())
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, HERE / "traced_build.py", model],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    touched = {(name, attribute) for name, attribute in told["touched"]}
    assert told["bytes"] > 100_000
    assert {("Builder", "build_serialized_network"), ("IBuilderConfig", "max_aux_streams")} <= touched
    assert {("IBuilderConfig", name) for name in RTX_CONFIG} <= touched
    for surface in SURFACES:
        known = {(c, n) for kind in ("classes", "enums") for c, names in surface[kind].items() for n in names}
        missing = touched - known
        if surface["package"] != RTX:
            missing -= {("IBuilderConfig", name) for name in RTX_CONFIG}
            missing = {(c, n) for c, n in missing if c not in RTX_ONLY}
        assert not missing, f"{surface['package']} {surface['version']}"
