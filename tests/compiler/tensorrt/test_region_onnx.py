"""Regions as ONNX: what ONNX Runtime makes of them is what the ops' torch references make."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
from polygraphy.comparator import Comparator, SimpleCompareFunc
from region_reference import (
    Lowered,
    ReferenceRunner,
    example_tensors,
    expected_of,
    feed_of,
    for_onnx_runtime,
    run_reference,
    single_op,
)

from tapeout.compiler.cuda_plan import ROW_MULTIPLE
from tapeout.compiler.ir import Module, parse
from tapeout.compiler.regions import DENSE_OPS, Body, distinct_bodies, find_regions
from tapeout.compiler.tensorrt.onnx_ops import LOWERINGS
from tapeout.compiler.tensorrt.region_onnx import region_onnx
from tapeout.plugins.case import Case, cases, tolerance
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.errors import UnsupportedError

ROWS = {"T": 5, "R": 3}
#: Of a whole region against torch: float32 sums in another order, 16 bits round at the same places.
TOLERANCES = {"float32": (2e-4, 1e-4), "float16": (2e-2, 1e-2), "bfloat16": (1.5e-1, 4e-2)}
#: Norms after products, gates, layer norms with biases and learned positions, rotary ops outside attention.
FAMILIES = (
    *((family, dtype) for family in ("qwen3", "gemma3_text") for dtype in TOLERANCES),
    *((family, "float32") for family in ("gpt2", "phi")),
)


def test_every_dense_op_has_a_form() -> None:
    assert set(LOWERINGS) == DENSE_OPS


def _cases() -> list[tuple[str, Case]]:
    """All cases of all dense ops, but for ids of 64 bits: steps have them in 32."""
    found = [(op, case) for op in sorted(DENSE_OPS) for case in cases(op)]
    return [(op, case) for op, case in found if "int64" not in {t.dtype for t in case.signature.inputs}]


@pytest.mark.parametrize(("op", "case"), _cases(), ids=lambda value: getattr(value, "label", value))
def test_an_op_in_onnx_runtime_equals_its_reference(op: str, case: Case, onnxruntime: ModuleType) -> None:
    body = single_op(op, case.signature)
    model = for_onnx_runtime(region_onnx(body, ROW_MULTIPLE), body)
    tensors = example_tensors(body, ROWS)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = dict(
        zip(body.outputs, session.run(list(body.outputs), feed_of(body, tensors, ROW_MULTIPLE)), strict=True)
    )
    for name, expected in expected_of(body, run_reference(body, tensors, ROWS)).items():
        wanted = tolerance(op, case.signature.outputs[0].dtype)
        assert wanted.violation(torch.from_numpy(got[name]), torch.from_numpy(expected)) is None


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_every_region_in_onnx_runtime_equals_torch(
    family: str, dtype: str, lowered: Lowered, onnxruntime: ModuleType
) -> None:
    """By polygraphy's comparator, with rows beyond one profile's first and padding filled with NaN."""
    for number, body in enumerate(distinct_bodies(find_regions(lowered(family, dtype))).values()):
        tensors = example_tensors(body, ROWS, seed=number)
        model = for_onnx_runtime(region_onnx(body, ROW_MULTIPLE), body)
        absolute, relative = TOLERANCES[dtype]
        results = Comparator.run(
            [
                ReferenceRunner(body, tensors, ROWS),
                OnnxrtRunner(SessionFromOnnx(model.SerializeToString())),
            ],
            data_loader=[feed_of(body, tensors, ROW_MULTIPLE)],
        )
        compare = SimpleCompareFunc(atol=absolute, rtol=relative, check_shapes=True)
        assert bool(Comparator.compare_accuracy(results, compare_func=compare)), f"region {number}"


def test_a_product_of_heads(onnxruntime: ModuleType) -> None:
    """Gemm takes matrices alone."""
    types = [TensorType("float32", shape) for shape in (("T", 3, 16), ("T", 3, 32), (32, 16), (32,))]
    test_an_op_in_onnx_runtime_equals_its_reference(
        "linear", Case("heads", OpSignature("linear", types[:1], types[2:], types[1:2], {})), onnxruntime
    )


def test_the_comparison_can_fail(lowered: Lowered, onnxruntime: ModuleType) -> None:
    """A wrong weight is seen: the tolerances are no blank cheque."""
    body = list(distinct_bodies(find_regions(lowered("qwen3", "bfloat16"))).values())[1]
    tensors = example_tensors(body, ROWS)
    expected = expected_of(body, run_reference(body, tensors, ROWS))
    tensors["w1"] = tensors["w1"] * 1.5
    model = for_onnx_runtime(region_onnx(body, ROW_MULTIPLE), body)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = dict(
        zip(body.outputs, session.run(list(body.outputs), feed_of(body, tensors, ROW_MULTIPLE)), strict=True)
    )
    absolute, relative = TOLERANCES["bfloat16"]
    assert not all(np.allclose(got[n], expected[n], rtol=relative, atol=absolute) for n in expected)


def _body(module: Module, number: int) -> Body:
    return list(distinct_bodies(find_regions(module)).values())[number]


def test_borders_are_the_arena_s(lowered: Lowered) -> None:
    """Rows are padded to what the arena has, weights are inputs, symbols are named, names are the body's."""
    model = region_onnx(_body(lowered("qwen3", "bfloat16"), 2), ROW_MULTIPLE)
    shapes = {
        info.name: [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim]
        for info in (*model.graph.input, *model.graph.output)
    }
    assert shapes["x0"] == ["T", 64]  # attention's [T, 4, 16]
    assert shapes["x1"] == ["R"]
    assert shapes["x8"] == ["R", 304]  # 300 logits
    assert shapes["w5"] == [300, 64]
    assert not [i for i in model.graph.initializer if i.data_type == onnx.TensorProto.BFLOAT16]
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}


def test_equal_bodies_give_equal_bytes(lowered: Lowered) -> None:
    body = _body(lowered("gemma3_text", "bfloat16"), 1)
    first, second = (region_onnx(body, ROW_MULTIPLE).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_an_unknown_activation_is_refused() -> None:
    module = parse(
        "tapeout-ir 1\ninput positions int32[T]\nweight w float32[8,8]\nweight t float32[4]\n"
        '%0 float32[T,8] = rope_table(positions; t) {dtype="float32", scaling=1.0}\n'
        '%1 float32[T,8] = activation(%0) {kind="mish"}\n%2 float32[T,8] = linear(%1; w, -)\nlogits %2\n'
    )
    (region,) = find_regions(module)
    with pytest.raises(UnsupportedError, match="activation 'mish' has no form in TensorRT segments"):
        region_onnx(region.body, ROW_MULTIPLE)
