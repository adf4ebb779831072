"""Check and time the CUDA tactics on a GPU: cubins are made where Triton is, and run where the GPU is.

    python benchmarks/check_kernels_cuda.py --make build/kernels_sm90 [--sm 90] [--op linear] [--model M...]
    python benchmarks/check_kernels_cuda.py --run build/kernels_sm90 [--op linear]

`--run` needs torch with CUDA and cuda-bindings, not Triton. A line a case: op, tactic, model and
shape, rows, largest error, ok or FAIL, median microseconds of a graph replay, GB/s, TFLOP/s.
Weights rotate over copies that together exceed the L2 cache, as the layers of a model do. Exit
status 1 when a case failed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapeout.plugins.case import Case, signature
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import NATIVE, Arg, CudaTactic, CudaTarget
from tapeout.plugins.op import AttrValue
from tapeout.plugins.registry import OPS, TRACE_ONLY_OPS, cuda_tactics
from tapeout.plugins.triton_aot.operands import grid_of

#: name: hidden, query heads, kv heads, head_dim, intermediate, vocabulary
MODELS = {
    "smollm2-135m": (576, 9, 3, 64, 1536, 49152),
    "llama-3.2-1b": (2048, 32, 8, 64, 8192, 128256),
    "llama-3.1-8b": (4096, 32, 8, 128, 14336, 128256),
}
ROWS = tuple(map(int, os.environ.get("ROWS", "1,8,64,512,2048").split(",")))
ROTATED_BYTES, MAX_COPIES, REPLAYS = 256 << 20, 32, 30
SHARED_BYTES = 232448
SM_COUNTS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 170}


def bucket_of(model: str, rows: int) -> int:
    """A bucket larger than its rows for the small model, which checks; a full one where times count."""
    return rows + 3 if model.startswith("smol") and rows in {1, 64} else rows


def model_cases(model: str, dtype: str) -> Iterator[tuple[str, Case]]:
    """(label, case) of every op a model of that shape runs; rows are those to try."""
    hidden, heads, kv_heads, dim, wide, vocab = MODELS[model]
    qkv = (heads + 2 * kv_heads) * dim

    def act(*shape: int) -> TensorType:
        return TensorType(dtype, ("T", *shape))

    def case(label: str, types: OpSignature, rows: tuple[int, ...] = ROWS) -> tuple[str, Case]:
        return label, Case(label, types, rows)

    norm: dict[str, AttrValue] = {"eps": 1e-5, "weight_offset": 0.0, "cast_before_weight": True}
    gain = (TensorType(dtype, (hidden,)),)
    for n, k, activation in ((qkv, hidden, ""), (2 * wide, hidden, "silu")):
        out = act(n // 2 if activation else n)
        attrs = {**norm, "activation": activation}
        weights = (*gain, TensorType(dtype, (n, k)))
        yield case(f"{n}x{k} {activation}", signature("norm_linear", (act(k),), (out,), weights, attrs))
    for n, k in ((hidden, hidden), (hidden, wide)):
        types = signature("linear_add", (act(k), act(n)), (act(n),), (TensorType(dtype, (n, k)),))
        yield case(f"{n}x{k}", types)
    head = (TensorType(dtype, ("R", hidden)),), (TensorType(dtype, ("R", vocab)),)
    yield case(
        f"{vocab}x{hidden}", signature("linear", *head, (TensorType(dtype, (vocab, hidden)),)), (1, 8, 64)
    )
    yield case("", signature("rms_norm", (act(hidden),), (act(hidden),), gain, norm))
    yield case("", signature("add_rms_norm", (act(hidden),) * 2, (act(hidden),) * 2, gain, norm))
    yield case("", signature("gated_activation", (act(2 * wide),), (act(wide),), (), {"activation": "silu"}))
    turned = act(heads + kv_heads, dim)
    yield case("", signature("rope", (turned, act(dim)), (turned,), (), {"interleaved": False}))
    ids = (TensorType("int32", ("T",)),)
    table = {"scaling": 1.0, "dtype": dtype}
    yield case("", signature("rope_table", ids, (act(dim),), (TensorType("float32", (dim // 2,)),), table))
    yield case("", signature("embedding", ids, (act(hidden),), (TensorType(dtype, (vocab, hidden)),)))
    chosen = TensorType(dtype, ("R", hidden))
    yield case("", signature("select_rows", (act(hidden), TensorType("int32", ("R",))), (chosen,)), (1, 64))
    yield case("", signature("add", (act(hidden),) * 2, (act(hidden),)), (64,))
    yield case("", signature("mul", (act(hidden),) * 2, (act(hidden),)), (64,))
    yield case("", signature("scale", (act(hidden),), (act(hidden),), (), {"factor": 0.25}), (64,))
    yield case("", signature("copy", (act(kv_heads, dim),), (act(kv_heads, dim),)), (64,))
    yield case("", signature("activation", (act(wide),), (act(wide),), (), {"kind": "gelu_tanh"}), (64,))
    attrs: dict[str, AttrValue] = {
        "layer": 1,
        "scale": dim**-0.5,
        "window": 0,
        "softcap": 0.0,
        "alibi": False,
    }
    q, kv = act(heads, dim), act(kv_heads, dim)
    steps = {
        "decode 1x1024": ((1, 1024),),
        "decode 1x8192": ((1, 8192),),
        "decode 8x1024": ((1, 1024),) * 8,
        "decode 64x1024": ((1, 1024),) * 64,
        "mixed": ((70, 70), (20, 83), (1, 50), (1, 1), (3, 100), *((1, 300 + 17 * i) for i in range(20))),
        "prefill 512": ((512, 512),),
        "prefill 2048": ((2048, 2048),),
        "prefill 8192": ((8192, 8192),),
        "chunk 512 of 2048": ((512, 2048),),
    }
    for label, sequences in steps.items():
        types = signature("paged_attention", (q, kv, kv), (q,), (), attrs)
        yield label, Case(label, types, (sum(n for n, _ in sequences),), sequences)
        roped = {
            **attrs, "interleaved": False, "qk_norm": False, "eps": 0.0, "weight_offset": 0.0,
            "cast_before_weight": False,
        }  # fmt: skip
        types = signature("rope_attention", (q, kv, kv, act(dim)), (q,), (), roped)
        yield label, Case(label, types, (sum(n for n, _ in sequences),), sequences)
    special = {**attrs, "window": 100, "softcap": 5.0}
    types = signature("paged_attention", (q, kv, kv), (q,), (TensorType(dtype, (heads,)),), special)
    yield "window, softcap, sinks", Case("special", types, (115,), steps["mixed"])


def wanted(model: str, dtype: str, tactic: CudaTactic, case: Case, rows: int, quick: bool) -> bool:
    """Which combinations are worth their compile time."""
    if tactic.max_rows and rows > tactic.max_rows:
        return False
    if tactic.decode_only and any(q > 1 for q, _ in case.sequences):
        return False
    if case.signature.op in {"linear", "norm_linear", "linear_add"}:
        few = tactic.max_rows > 0
        if rows <= 8 and not few and model != "smollm2-135m":
            return False
        if model == "llama-3.2-1b" and rows not in {1, 8}:
            return False
        if model == "smollm2-135m" and (rows == 2048 or (quick and tactic.name.endswith("w2s3"))):
            return False
    elif not case.sequences and rows in {8, 512} and model != "smollm2-135m":
        return False
    return True


def make(
    folder: Path, sm: int, only: str | None, models: list[str], named: str, quick: bool, workers: int
) -> None:
    """Write `pack.json` and the cubins."""
    from tapeout.plugins.triton_aot import compile_all, kernel_digest

    target = CudaTarget(sm, SM_COUNTS[sm], SHARED_BYTES)
    cases, specs = [], {}
    runs = [(m, d) for m in models for d in ("float32", "bfloat16") if m.startswith("smol") or d != "float32"]
    for model, dtype in runs:
        for label, case in model_cases(model, dtype):
            op = case.signature.op
            for tactic in cuda_tactics(op) if only is None or op in only.split(",") else ():
                if tactic.provider != NATIVE or not re.search(named, tactic.name):
                    continue
                if tactic.unsupported(case.signature, target):
                    continue
                for rows in case.rows:
                    if not re.search(os.environ.get("CASE", ""), label):
                        continue
                    if not wanted(model, dtype, tactic, case, rows, quick):
                        continue
                    bucket = bucket_of(model, rows)
                    launches = tactic.launches(case.signature, bucket, target)
                    specs.update((kernel_digest(s.kernel), s.kernel) for s in launches)
                    cases.append(
                        {
                            "model": model, "label": label, "tactic": tactic.name, "rows": rows,
                            "bucket": bucket,
                            "signature": asdict(case.signature), "sequences": case.sequences,
                            "workspace_bytes": tactic.workspace_bytes(case.signature, bucket, target),
                            "launches": [
                                {
                                    "kernel": kernel_digest(s.kernel), "grid": grid_of(s, bucket),
                                    "args": [asdict(a) for a in s.args],
                                }
                                for s in launches
                            ],
                        }
                    )  # fmt: skip
    print(f"{len(cases)} cases, {len(specs)} kernels", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    kernels = {}
    for digest, built in zip(specs, compile_all(list(specs.values()), sm, workers), strict=True):
        fields = asdict(built)
        (folder / f"{digest}.cubin").write_bytes(fields.pop("cubin"))
        kernels[digest] = fields
    (folder / "pack.json").write_text(json.dumps({"sm": sm, "kernels": kernels, "cases": cases}))
    print(f"wrote {folder}: {sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.1f} MB")


def read_signature(fields: dict[str, Any]) -> OpSignature:
    def types(name: str) -> tuple[TensorType, ...]:
        return tuple(TensorType(t["dtype"], tuple(t["shape"])) for t in fields[name])

    return OpSignature(fields["op"], types("inputs"), types("weights"), types("outputs"), fields["attrs"])


_CTYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class Device:
    """Loads cubins and launches them on torch's current stream."""

    def __init__(self, folder: Path, kernels: dict[str, Any]) -> None:
        import torch
        from cuda.bindings import driver

        torch.zeros(1, device="cuda")
        self._torch, self._driver, self._folder, self._kernels = torch, driver, folder, kernels
        self._functions: dict[str, Any] = {}
        self._scratch: dict[int, Any] = {}

    def _call(self, name: str, *args: Any) -> Any:
        error, *rest = getattr(self._driver, name)(*args)
        if int(error) != 0:
            raise RuntimeError(f"{name}: {error}")
        return rest[0] if rest else None

    def function(self, digest: str) -> Any:
        if digest not in self._functions:
            fields = self._kernels[digest]
            module = self._call("cuModuleLoadData", (self._folder / f"{digest}.cubin").read_bytes())
            function = self._call("cuModuleGetFunction", module, fields["symbol"].encode())
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, attribute, fields["shared_bytes"])
            if fields["prefers_l1"]:
                attribute = (
                    self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                )
                self._call("cuFuncSetAttribute", function, attribute, 0)
            self._functions[digest] = (module, function)
        return self._functions[digest][1]

    def scratch(self, size: int) -> int:
        if size and size not in self._scratch:
            self._scratch[size] = self._torch.empty(size, dtype=self._torch.uint8, device="cuda")
        return self._scratch[size].data_ptr() if size else 0

    def launch(self, launch: dict[str, Any], operands: Any) -> None:
        fields = self._kernels[launch["kernel"]]
        values, types = [], []
        for kind, source in zip(fields["arguments"], launch["args"], strict=False):
            value = operands.value(Arg(**source))
            values.append(value.data_ptr() if kind.startswith("*") else value)
            types.append(ctypes.c_void_p if kind.startswith("*") else _CTYPES[kind])
        x, y, z = launch["grid"]
        x *= fields["cluster"]
        values += [self.scratch(fields["scratch_bytes"] * x * y * z), 0]
        types += [ctypes.c_void_p] * 2
        stream = self._torch.cuda.current_stream().cuda_stream
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ = fields["threads"], 1, 1
        config.sharedMemBytes, config.hStream = fields["shared_bytes"], stream
        attributes, ids = [], driver.CUlaunchAttributeID
        if fields["overlap"] and "TAPEOUT_NO_OVERLAP" not in os.environ:
            attribute = driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if fields["cluster"] > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = fields["cluster"], 1, 1
            attributes.append(attribute)
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        params = (tuple(values), tuple(types))
        self._call("cuLaunchKernelEx", config, self.function(launch["kernel"]), params, 0)


def time_us(device: Device, case: dict[str, Any], operands: Any) -> float:
    """Median microseconds of one run, over graph replays that rotate copies of the weights."""
    from dataclasses import replace

    import torch

    size = sum(w.numel() * w.element_size() for w in operands.weights)
    copies = min(MAX_COPIES, -(-ROTATED_BYTES // size)) if size > 1 << 20 else 20
    sets = [operands]
    for _ in range(copies - 1):
        rotated = [w.clone() for w in operands.weights] if size > 1 << 20 else operands.weights
        sets.append(replace(operands, weights=rotated))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in sets:
            for launch in case["launches"]:
                device.launch(launch, each)
    times = []
    for _ in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / copies)
    return statistics.median(times[3:])


def work_of(types: OpSignature, operands: Any, sequences: Any, rows: int) -> tuple[float, float]:
    """(bytes, floating point operations) of one run: each input read and each output written once."""
    moved = float(sum(w.numel() * w.element_size() for w in operands.weights))
    if types.op == "embedding":
        moved = 0.0
    for tensor in (*operands.inputs, *operands.outputs):
        moved += rows * tensor[0].numel() * tensor.element_size()
    operations = 0.0
    if "linear" in types.op:
        n, k = next(w.shape for w in types.weights if len(w.shape) == 2)
        operations = 2.0 * rows * float(n) * float(k)
    if sequences:
        heads, dim = operands.inputs[0].shape[1:]
        kv_row = operands.inputs[1][0].numel() * operands.inputs[1].element_size()
        moved += 2 * kv_row * sum(kv for _, kv in sequences)
        operations = 4.0 * heads * dim * sum(q * kv - q * (q - 1) / 2 for q, kv in sequences)
    return moved, operations


def run(folder: Path, only: str | None) -> int:
    """Check and time every case of a pack; the number that failed."""
    import torch

    from tapeout.plugins.triton_aot.bound_case import bind

    pack = json.loads((folder / "pack.json").read_text())
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device, failed = Device(folder, pack["kernels"]), 0
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {len(pack['cases'])} cases", flush=True
    )
    for case in pack["cases"]:
        types = read_signature(case["signature"])
        if only is not None and types.op not in only.split(","):
            continue
        sequences = tuple(tuple(s) for s in case["sequences"])
        largest = max(pack["kernels"][item["kernel"]]["shared_bytes"] for item in case["launches"])
        if largest > SHARED_BYTES:
            print(f"{types.op:16} {case['tactic']:28} left out: {largest} bytes of shared memory")
            continue
        described = Case(case["label"], types, (case["rows"],), sequences)
        bound = bind(
            described, case["rows"], case["workspace_bytes"], case["bucket"], "cuda", seed=case["rows"]
        )
        bound.poison()
        for launch in case["launches"]:
            device.launch(launch, bound.operands)
        torch.cuda.synchronize()
        problem, error = bound.problem()
        failed += problem is not None
        rate = ""
        if problem is None:
            median = time_us(device, case, bound.operands)
            moved, operations = work_of(types, bound.operands, sequences, case["rows"])
            rate = f"{median:9.2f} us {moved / median / 1e3:8.1f} GB/s"
            rate += f" {operations / median / 1e6:7.1f} TFLOP/s" if operations else ""
        dtype = types.outputs[0].dtype.replace("bfloat", "bf").replace("float", "f")
        what = f"{types.op:16} {case['tactic']:28} {case['model']:12} {dtype:4} {case['label']:22}"
        print(
            f"{what} {case['rows']:5} {error:9.2e} {'FAIL ' + problem if problem else 'ok'} {rate}",
            flush=True,
        )
        del bound
    print(f"{failed} failed")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--make", type=Path, metavar="DIR", help="compile a pack here; needs Triton")
    action.add_argument("--run", type=Path, metavar="DIR", help="check and time a pack here; needs a GPU")
    parser.add_argument("--sm", type=int, default=90, choices=sorted(SM_COUNTS))
    parser.add_argument("--op", help=f"these ops alone, of {', '.join(sorted(set(OPS) - TRACE_ONLY_OPS))}")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tactic", default="", metavar="REGEX", help="tactics alone whose names match")
    parser.add_argument("--quick", action="store_true", help="fewer tactics")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.make:
        make(
            options.make, options.sm, options.op, options.model, options.tactic, options.quick,
            options.workers,
        )  # fmt: skip
    elif options.run:
        sys.exit(1 if run(options.run, options.op) else 0)
    else:
        print("nothing to do: name --make DIR (needs Triton) or --run DIR (needs a GPU)")


if __name__ == "__main__":
    main()
