"""Real segments by TensorRT-RTX, built without a GPU. They cannot be executed here, nor even deserialized."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import onnx
import pytest
from onnx import helper
from region_reference import Lowered
from smollm2_shape import smollm2_module

from tapeout.compiler.ir import Module
from tapeout.compiler.regions import distinct_bodies, find_regions
from tapeout.compiler.tensorrt import segments as segments_module
from tapeout.compiler.tensorrt.segment_plan import SegmentPlan
from tapeout.compiler.tensorrt.segments import build_segments
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.tensorrt.package import RTX

LIMITS = Limits(max_batch_size=8, max_num_tokens=256, max_seq_len=64, tokens_per_page=16)
SMOLLM2 = [(sm, dtype) for sm in (80, 86, 89, 120) for dtype in ("bfloat16", "float16")]
TINY = [("qwen3", 86, "float16"), ("qwen3", 120, "bfloat16"), ("gemma3_text", 80, "bfloat16"),
        ("gemma3_text", 89, "float16")]  # fmt: skip


def check(plan: SegmentPlan, module: Module) -> None:
    """Every region has a segment with its tensors; weights are not in it."""
    regions = find_regions(module)
    assert [(r.first, r.last) for r in plan.regions] == [(r.first, r.last) for r in regions]
    assert len(plan.segments) == len(plan.blobs) == len(distinct_bodies(regions)) == 3
    for placed, region in zip(plan.regions, regions, strict=True):
        segment = plan.segments[placed.segment]
        assert [t.name for t in segment.weights] == list(region.body.weights)
        assert len(segment.inputs) == len(region.inputs)
        assert len(segment.profiles) == 2
        products = sum(n.op in {"linear", "linear_add", "norm_linear"} for n in region.body.nodes)
        kinds = Counter(layer.partition(" ")[0] for layer in segment.layers)
        fused = sum("Fc" in layer for layer in segment.layers if layer.startswith("runtime_fusion"))
        assert kinds["gemm"] + fused == 2 * products  # in each of two profiles
        assert not [layer for layer in segment.layers if "ShapeHostToDevice" in layer]
    # 28 MB of weights (54 MB with the logits') stay outside.
    assert all(len(blob) < 4_000_000 for blob in plan.blobs.values())


@pytest.mark.parametrize(("sm", "dtype"), SMOLLM2)
def test_smollm2(sm: int, dtype: str, rtx: str) -> None:
    module = smollm2_module(dtype, layers=3)
    plan = build_segments(module, LIMITS, sm, RTX)
    check(plan, module)
    assert {(s.package, s.version) for s in plan.segments} == {(RTX, rtx)}
    middle = plan.segments[1]
    names = [re.sub(r" \[profile \d+\]|_myl\d+_\d+$", "", layer) for layer in middle.layers]
    # What lies between products is a kernel each: both norms with what is next to them, and the gate.
    kernels = [name.removeprefix("kgen __myl_") for name in names if name.startswith("kgen __myl_")]
    assert sum("MeanAddSqrtDivMul" in name for name in kernels) == 4
    assert sum("Silu" in name for name in kernels) == 2
    assert len(names) < 2 * 12
    assert [r.regions for r in plan.reports] == [1, 2, 1]


@pytest.mark.parametrize(("family", "sm", "dtype"), TINY)
def test_tiny_models(family: str, sm: int, dtype: str, lowered: Lowered, rtx: str) -> None:
    module = lowered(family, dtype)
    check(build_segments(module, LIMITS, sm, RTX), module)


def test_the_same_cache_gives_the_same_bytes(
    rtx: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was built is kept; another version, target or profile is another segment; damage is seen."""
    module = smollm2_module("bfloat16", layers=2)
    kept = tmp_path / "kept"
    first = build_segments(module, LIMITS, 89, RTX, kept=kept)
    again = build_segments(module, LIMITS, 89, RTX)
    # Without a cache the builder may number things otherwise; what it builds is the same.
    assert [s.layers for s in again.segments] == [s.layers for s in first.segments]
    assert [r.plan_bytes for r in again.reports] == [r.plan_bytes for r in first.reports]
    built: list[int] = []
    real = segments_module._build

    def watched(models: dict[str, bytes], *rest: object) -> object:
        built.append(len(models))
        return real(models, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(segments_module, "_build", watched)
    assert build_segments(module, LIMITS, 89, RTX, kept=kept) == first
    assert built == []
    damaged = sorted(kept.glob("*.plan"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0\1")
    build_segments(module, LIMITS, 89, RTX, kept=kept)
    assert built == [1]
    assert build_segments(module, LIMITS, 86, RTX, kept=kept).blobs != first.blobs
    assert built == [1, 3]


def test_a_compute_capability_that_it_does_not_know(rtx: str) -> None:
    """`choose_package` refuses it before; so does the builder, and its process tells."""
    with pytest.raises(
        TapeoutError, match=r"TensorRT-RTX .* does not build for SM90, expected one of SM75"
    ) as told:
        build_segments(smollm2_module("bfloat16", layers=2), LIMITS, 90, RTX)
    assert "--tactics native" in str(told.value.hint)


def test_what_the_builder_refuses_is_told(rtx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own first error, in one line."""
    tensors = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["T", 8]) for n in ("x0", "y0")]
    graph = helper.make_graph([helper.make_node("NoSuchOp", ["x0"], ["y0"])], "g", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    monkeypatch.setattr(segments_module, "_model", lambda body: model.SerializeToString())
    with pytest.raises(TapeoutError, match=r"TensorRT-RTX .* did not build a segment for sm_89: .*NoSuchOp"):
        build_segments(smollm2_module("bfloat16", layers=2), LIMITS, 89, RTX)


def test_a_process_that_dies_is_told(rtx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module.sys, "executable", "/bin/false")
    with pytest.raises(TapeoutError, match="the process that builds TensorRT segments ended with 1") as told:
        build_segments(smollm2_module("bfloat16", layers=2), LIMITS, 89, RTX)
    assert "--keep-onnx" in str(told.value.hint)
