"""TensorRT-RTX segments: seconds to build, bytes, layers, and whether two builds are equal, without a GPU.

    python benchmarks/tensorrt_rtx_segments.py SMOLLM2.gguf [--sms 80,86,89,120] [--dtypes bfloat16,float16]

For SmolLM2 and tiny Qwen3 and Gemma 3, every distinct dense region is built twice for every compute
capability and dtype, in this process, at the limits of `tapeout build` (64 requests, 2,048 tokens a step).
float16 is the bfloat16 module with its dtype replaced, since engines are not built in it yet. Seconds are the
builder's own of the first build. `layers` counts what the builder made of the ops in both profiles; nothing
is executed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import record

from tapeout.compiler.cuda_plan import ROW_MULTIPLE
from tapeout.compiler.front_end import Stages, lower_model
from tapeout.compiler.ir import Module, parse
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.progress import SilentProgress
from tapeout.compiler.regions import distinct_bodies, find_regions
from tapeout.compiler.tensorrt.builder import build_segment
from tapeout.compiler.tensorrt.region_onnx import region_onnx
from tapeout.compiler.tensorrt.segments import profiles_of
from tapeout.model_defs.tiny import tiny_config, write_tiny
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.tensorrt.package import RTX, Package, load

LIMITS = Limits(max_batch_size=64, max_num_tokens=2048, max_seq_len=512, tokens_per_page=32)


def lowered(model: str) -> Module:
    """The module that a build for a GPU plans, in bfloat16."""
    options = BuildOptions(target="cuda:sm_89", dtype="bfloat16")
    return lower_model(model, options, Stages(SilentProgress()), lambda source: None).module


def measure(package: Package, module: Module, sm: int) -> list[dict[str, Any]]:
    """Every distinct region of a module, built twice."""
    regions = find_regions(module)
    rows = []
    for digest, body in distinct_bodies(regions).items():
        model = region_onnx(body, ROW_MULTIPLE).SerializeToString(deterministic=True)
        first, second = (build_segment(package, model, profiles_of(body, LIMITS), sm) for _ in range(2))
        products = sum(node.op in {"linear", "linear_add", "norm_linear"} for node in body.nodes)
        weights = sum(_bytes(w.dtype, w.shape) for w in body.weights.values())
        rows.append(
            {
                "region": digest[:16],
                "regions": sum(region.body.digest == digest for region in regions),
                "ops": [node.op for node in body.nodes],
                "products": products,
                "weight_bytes": weights,
                "onnx_bytes": len(model),
                "plan_bytes": len(first.plan),
                "seconds": round(first.seconds, 3),
                "layers": dict(Counter(layer.partition(" ")[0] for layer in first.layers)),
                "same_layers_twice": first.layers == second.layers,
                "same_bytes_twice": first.plan == second.plan,
            }
        )
    return rows


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}[dtype]
    for n in shape:
        size *= n
    return size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("--sms", default="80,86,89,120")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    arguments = parser.parse_args()
    package = load(RTX)
    with tempfile.TemporaryDirectory() as folder:
        models = {"SmolLM2-135M": str(arguments.smollm2)}
        for family in ("qwen3", "gemma3_text"):
            models[f"tiny {family}"] = str(Path(folder) / family)
            write_tiny(Path(folder) / family, tiny_config(family))
        modules = {name: lowered(path) for name, path in models.items()}
    builds = []
    for name, module in modules.items():
        for dtype in arguments.dtypes.split(","):
            own = parse(module.text().replace("bfloat16", dtype))
            for sm in map(int, arguments.sms.split(",")):
                segments = measure(package, own, sm)
                builds.append({"model": name, "dtype": dtype, "sm": sm, "segments": segments})
                total = sum(s["plan_bytes"] for s in segments)
                seconds = sum(s["seconds"] for s in segments)
                title = f"{name}, {dtype}, sm_{sm}: {len(segments)} segments"
                print(f"{title}, {total:,} bytes, {seconds:.2f} s", flush=True)
    where = {"package": package.title, "limits": vars(LIMITS)}
    record.write(
        "tensorrt_rtx_segments",
        {
            "what": "TensorRT-RTX segments of dense regions, built without a GPU; none has been executed",
            "conditions": {**record.conditions(os.cpu_count() or 1), **where},
            "builds": builds,
        },
    )


if __name__ == "__main__":
    main()
