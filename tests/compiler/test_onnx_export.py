"""`export_engine`: what ONNX, other tools and the reference evaluator make of the exported graph."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import defs
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from tapeout.compiler.build import build
from tapeout.compiler.ir import Module, Node, Operand, Value, WeightType, parse, whole
from tapeout.compiler.onnx_export import export_engine, graph, register_op_schemas
from tapeout.compiler.onnx_export.op_schemas import DOMAIN, updated_outputs
from tapeout.compiler.onnx_export.standard_ops import standard_op
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.tactics.select import choose_untimed
from tapeout.plugins.errors import EngineCorruptError, EngineError, UnsupportedError, UsageError
from tapeout.plugins.registry import OPS, TRACE_ONLY_OPS
from tapeout.runtime.engine import open_engine
from tapeout.runtime.executors import load_executor
from tapeout.runtime.step import StepInputs

pytestmark = pytest.mark.usefixtures("shared_traces")

BuildTiny = Callable[..., Path]

CONFIGS: dict[str, dict[str, Any]] = {"llama": {"attention_bias": True}}
ENGINES: dict[str, dict[str, Any]] = {
    "llama": {},  # biases
    "gemma2": {"quantize": "int8-dynamic"},  # scaled embeddings, norms with an offset, soft caps, windows
    "qwen3": {"dtype": "bfloat16", "weights": "shared"},  # norms of heads
}


@pytest.fixture(scope="module")
def build_tiny(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> BuildTiny:
    """Builds a tiny engine once per set of arguments, without timing tactics."""
    made: dict[Any, Path] = {}

    def make(model_type: str, **options: Any) -> Path:
        key = (model_type, *options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("onnx")
            chosen = BuildOptions(
                verify=False,
                max_batch_size=4,
                max_num_tokens=32,
                max_seq_len=64,
                tokens_per_page=8,
                **options,
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tapeout.compiler.choose.select_tactics", _untimed)
                model = models.make_tiny(model_type, folder / "model", **CONFIGS.get(model_type, {}))
                build(str(model), folder / "m.engine", chosen)
            made[key] = folder / "m.engine"
        return made[key]

    return make


def _untimed(signatures: Any, limits: Any, host: Any, *_: Any, batch_invariant: bool, **__: Any) -> Any:
    return choose_untimed(signatures, limits, host, batch_invariant)


@pytest.fixture(scope="module")
def llama(build_tiny: BuildTiny) -> Path:
    return build_tiny("llama")


def export(engine: Path, name: str = "m.onnx") -> Path:
    out = engine.with_name(name)
    export_engine(engine, out)
    return out


@pytest.mark.parametrize("model_type", ENGINES)
def test_the_checker_infers_the_declared_shapes(model_type: str, build_tiny: BuildTiny) -> None:
    out = export(build_tiny(model_type, **ENGINES[model_type]))
    onnx.checker.check_model(out, full_check=True, check_custom_domain=True)
    model = onnx.load(out, load_external_data=False)
    declared = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    results = {name for node in model.graph.node for name in node.output}
    assert results == set(declared)
    assert [i.name for i in model.graph.input[:3]] == ["token_ids", "positions", "row_ids"]
    del model.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    found = {v.name: v for v in (*inferred.graph.value_info, *inferred.graph.output)}
    assert found == declared


@pytest.mark.parametrize("model_type", ENGINES)
def test_weights_are_the_engines_bytes(model_type: str, build_tiny: BuildTiny) -> None:
    path = build_tiny(model_type, **ENGINES[model_type])
    out = export(path)
    assert out.stat().st_size < 60_000
    tensors = {t.name: t for t in onnx.load(out).graph.initializer}
    with open_engine(path) as engine:
        assert set(engine.weights) <= set(tensors)
        for name, info in engine.weights.items():
            assert tensors[name].raw_data == bytes(engine.weight(name).data)
            assert tuple(tensors[name].dims) == info.shape
            assert onnx.TensorProto.DataType.Name(tensors[name].data_type) == {
                "float32": "FLOAT", "bfloat16": "BFLOAT16", "int8": "INT8"
            }[info.dtype]  # fmt: skip


def test_tools_that_do_not_know_the_domain_read_it(llama: Path) -> None:
    code = (
        "import sys, onnx, onnx_graphsurgeon as gs\n"
        "onnx.checker.check_model(sys.argv[1], full_check=True)\n"
        "graph = gs.import_onnx(onnx.load(sys.argv[1]))\n"
        "print(len(graph.cleanup().toposort().nodes), *[t.name for t in graph.outputs])\n"
        "onnx.checker.check_model(gs.export_onnx(graph))\n"
    )
    out = export(llama)
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=True)
    count = len(onnx.load(out, load_external_data=False).graph.node)
    assert done.stdout.split() == [str(count), "logits", "kv_pool_out"]


def test_nodes_name_their_record_and_tactics(llama: Path) -> None:
    model = onnx.load(export(llama), load_external_data=False)
    facts = {p.key: p.value for p in model.metadata_props}
    with open_engine(llama) as engine:
        program = engine.program
        assert facts["tapeout.engine_digest"] == engine.digest
        assert facts["tapeout.target"] == engine.manifest.target
        assert facts["tapeout.ir_digest"] == parse(engine.text("graph.ir").decode()).digest()
    nodes = [{p.key: p.value for p in n.metadata_props} for n in model.graph.node if n.metadata_props]
    assert [n["tapeout.op"] for n in nodes] == [record.op for record in program.records]
    assert [n["tapeout.record"] for n in nodes] == [str(i) for i in range(len(program.records))]
    assert nodes[0]["tapeout.tactics"].endswith(" up to 32 rows")
    assert {n.op_type for n in model.graph.node if n.domain == DOMAIN} == {
        "rope_table", "rope", "paged_attention", "add_rms_norm", "gated_activation"
    }  # fmt: skip


def test_equal_engines_give_equal_bytes(llama: Path) -> None:
    assert export(llama, "a.onnx").read_bytes() == export(llama, "b.onnx").read_bytes()


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_reference_evaluator_computes_the_engines_logits(model_type: str, build_tiny: BuildTiny) -> None:
    path = build_tiny(model_type, **ENGINES[model_type])
    evaluator = ReferenceEvaluator(onnx.load(export(path)), new_ops=list(reference_ops()))
    with open_engine(path) as engine:
        executor = load_executor(engine, num_pages=12, threads=2)
        kv = engine.manifest.kv_cache
        pool = np.zeros((12, kv.layers, 2, kv.kv_heads, 8, kv.head_dim), np.float32)
        for step in two_steps():
            names = ("token_ids", "positions", "row_ids", "page_table", "cu_q", "kv_lens")
            feeds = {name: getattr(step, name) for name in names}
            logits, pool = evaluator.run(None, {**feeds, "kv_pool": pool})
            np.testing.assert_allclose(logits, executor.forward(step), atol=1e-4, rtol=1e-4)
        executor.close()
    assert np.count_nonzero(pool.any(axis=(1, 2, 3, 4, 5))) == 4  # pages that were written


def two_steps() -> tuple[StepInputs, StepInputs]:
    """Two prompts of 11 and 5 tokens, then the next token of one and a chunk of the other."""
    ids = np.random.default_rng(0).integers(5, 300, 32).astype(np.int32)
    pages = np.array([[7, 2, -1], [4, 9, -1]], np.int32)

    def step(lengths: tuple[int, int], cached: tuple[int, int]) -> StepInputs:
        cu_q = np.cumsum([0, *lengths])
        arrays: dict[str, Any] = {
            "token_ids": ids[: cu_q[-1]],
            "positions": np.concatenate([np.arange(c, c + n) for n, c in zip(lengths, cached, strict=True)]),
            "cu_q": cu_q,
            "kv_lens": np.add(lengths, cached),
            "slots": [0, 1],
            "row_ids": cu_q[1:] - 1,
            "row_slots": [0, 1],
        }
        return StepInputs(page_table=pages, **{k: np.asarray(v, np.int32) for k, v in arrays.items()})

    return step((11, 5), (0, 0)), step((1, 6), (11, 5))


def reference_ops() -> list[type[OpRun]]:
    """Every op of the domain for ONNX's evaluator: the torch reference on copies of the arguments."""
    return [_reference_op(name) for name in OPS if name not in TRACE_ONLY_OPS]


def _reference_op(name: str) -> type[OpRun]:
    schema = OPS[name]
    compute = importlib.import_module(f"tapeout.plugins.{name}.reference").reference
    arguments = [n.rstrip("?") for n in (*schema.inputs, *schema.weights, *schema.step_inputs)]

    def run(self: OpRun, *arrays: np.ndarray | None, **attrs: Any) -> tuple[np.ndarray, ...]:
        tensors = [None if a is None else torch.from_numpy(np.array(a)) for a in arrays]
        tensors += [None] * (len(arguments) - len(tensors))
        result = compute(*tensors, *(kind(attrs[key]) for key, kind in schema.attrs.items()))
        results = result if isinstance(result, tuple) else (result,)
        updated = [tensors[arguments.index(n)] for n in updated_outputs(schema)]
        return tuple(t.numpy() for t in (*results, *updated))

    return type(name, (OpRun,), {"op_domain": DOMAIN, "_run": run})


# Where the file may stand


def test_the_engine_may_lie_below_the_model(llama: Path) -> None:
    out = llama.parent.parent / "above.onnx"
    export_engine(llama, out)
    onnx.checker.check_model(out)
    tensors = onnx.load(out, load_external_data=False).graph.initializer
    assert {t.external_data[0].value for t in tensors if t.external_data} == {f"{llama.parent.name}/m.engine"}


def test_no_path_to_the_weights_is_an_error_with_a_way_out(llama: Path, tmp_path: Path) -> None:
    link, hard = tmp_path / "link.engine", tmp_path / "hard.engine"
    link.symlink_to(llama)
    for engine in (llama, link):
        with pytest.raises(UsageError, match="ONNX accepts files in or below") as caught:
            export_engine(engine, tmp_path / "m.onnx")
        assert str(llama.parent / "m.onnx") in str(caught.value.hint)
    link.unlink()
    hard.write_bytes(llama.read_bytes())
    (tmp_path / "other.engine").hardlink_to(hard)
    with pytest.raises(UsageError, match="several hard links"):
        export_engine(hard, tmp_path / "m.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hard.engine", "other.engine"]


def test_the_engine_is_never_overwritten(build_tiny: BuildTiny) -> None:
    path = build_tiny("qwen3", **ENGINES["qwen3"])
    (weights,) = path.parent.glob("*.weights.safetensors")
    for target in (path, weights):
        before = target.read_bytes()
        with pytest.raises(UsageError, match="would be overwritten"):
            export_engine(path, target)
        assert target.read_bytes() == before
    for target, what in ((path.parent, "is a directory"), (path.parent / "no" / "m.onnx", "no existing dir")):
        with pytest.raises(UsageError, match=what):
            export_engine(path, target)


def test_a_failed_write_leaves_the_old_file(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = export(llama, "kept.onnx")
    before, files = out.read_bytes(), set(out.parent.iterdir())

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match="No space left"):
        export_engine(llama, out)
    assert out.read_bytes() == before
    assert set(out.parent.iterdir()) == files


# Engines whose graph cannot be trusted


def test_a_graph_that_is_not_the_programs_is_corrupt(llama: Path, tmp_path: Path) -> None:
    """The text has no checksum that opening compares: one changed character must not go unnoticed."""
    data = llama.read_bytes()
    start = data.index(b"tapeout-ir 1")
    places = (b"layer=1", b"%3[T,2,16|128,16,1|96]", b"linear(", b"; -, -)", b"logits %", b"float32[300,64]")
    for place in places:
        at = data.index(place, start) + len(place) - 2
        damaged = tmp_path / "damaged.engine"
        damaged.write_bytes(data[:at] + b"7" + data[at + 1 :])
        with pytest.raises(EngineCorruptError, match="graph"):
            export_engine(damaged, tmp_path / "m.onnx")
    assert not list(tmp_path.glob("*.onnx"))


def test_an_engine_without_a_graph_is_named(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    monkeypatch.setattr("tapeout.compiler.onnx_export.IR_TEXT", "other.ir")
    with pytest.raises(EngineError, match=r"holds no graph \(text 'other.ir'\); it has .*tokenizer.json"):
        export_engine(llama, llama.with_name("none.onnx"))


# Parts


def test_every_op_has_a_schema_from_its_folder() -> None:
    register_op_schemas()
    register_op_schemas()
    for name in set(OPS) - TRACE_ONLY_OPS:
        known = defs.get_schema(name, 1, DOMAIN)
        assert f"{name}:" in known.doc
        assert set(known.attributes) == set(OPS[name].attrs)
        assert known.min_input >= len(OPS[name].inputs)
    attention = defs.get_schema("paged_attention", 1, DOMAIN)
    assert [o.name for o in attention.outputs] == ["out", "kv_pool_out"]
    assert [i.name for i in attention.inputs][3:5] == ["slopes", "sinks"]


def test_every_step_tensor_has_a_type(llama: Path) -> None:
    with open_engine(llama) as engine:
        known = graph.step_tensors(engine.manifest)
    assert set(known) >= {name for schema in OPS.values() for name in schema.step_inputs}


def _node(op: str, dtype: str, shape: tuple[Any, ...] = ("T", 8), **attrs: Any) -> tuple[Node, Module]:
    x = Value("x", dtype, shape)
    weights = {"w": WeightType(dtype, (8,))} if OPS[op].weights else {}
    node = Node(op, (whole(x),) * len(OPS[op].inputs), tuple(weights), (Value("%0", dtype, shape),), attrs)
    return node, Module((x,), weights, (node,), whole(node.outputs[0]))


def test_standard_ops_only_where_they_are_exact() -> None:
    def chosen(op: str, dtype: str, **facts: Any) -> str | None:
        found = standard_op(*_node(op, dtype, **facts))
        return found and found.op_type

    norm = {"eps": 1e-5, "weight_offset": 0.0, "cast_before_weight": True}
    assert chosen("rms_norm", "bfloat16", **norm) == "RMSNormalization"
    assert chosen("rms_norm", "bfloat16", **{**norm, "cast_before_weight": False}) is None
    assert chosen("rms_norm", "float32", **{**norm, "cast_before_weight": False}) == "RMSNormalization"
    assert chosen("rms_norm", "float32", **{**norm, "weight_offset": 1.0}) is None
    assert (chosen("scale", "float32", factor=2.0), chosen("scale", "bfloat16", factor=2.0)) == ("Mul", None)
    assert (chosen("linear", "float32"), chosen("linear", "float32", shape=("T", 2, 8))) == ("Gemm", None)
    kinds = ("gelu", "relu", "silu")
    assert [chosen("activation", "float32", kind=k) for k in kinds] == ["Gelu", "Relu", None]


def test_an_inexpressible_graph_lists_every_place(llama: Path) -> None:
    x = Value("%0", "float32", ("T", 8))
    overlapping = Operand("%0", ("T", 4, 4), (8, 2, 1))
    other_rows = Operand("%0", ("T", 4), (4, 1))
    ids = Value("token_ids", "int32", ("T",))
    nodes = [
        Node("embedding", (whole(ids),), ("w",), (x,), {}),
        Node("copy", (overlapping,), (), (Value("%1", "float32", ("T", 4, 4)),), {}),
        Node("copy", (other_rows,), (), (Value("%2", "float32", ("T", 4)),), {}),
    ]
    module = Module((ids,), {"w": WeightType("float32", (9, 8))}, tuple(nodes), whole(x))
    with open_engine(llama) as engine, pytest.raises(UnsupportedError) as caught:
        graph.build_graph(module, engine.program, engine.manifest, {})
    assert "1_copy reads %0[T,4,4|8,2,1]" in caught.value.message
    assert "2_copy reads %0[T,4|4,1]" in caught.value.message


def test_logits_may_be_a_window(llama: Path) -> None:
    ids, x = Value("token_ids", "int32", ("T",)), Value("%0", "float32", ("T", 8))
    node = Node("embedding", (whole(ids),), ("w",), (x,), {})
    module = Module(
        (ids,), {"w": WeightType("float32", (9, 8))}, (node,), Operand("%0", ("T", 2, 3), (8, 3, 1), 2)
    )
    with open_engine(llama) as engine:
        file = {"w": graph.TensorFile("w", 0, 288)}
        made = graph.build_graph(module, engine.program, engine.manifest, file)
    table = np.arange(72, dtype=np.float32).reshape(9, 8)
    made.initializer[-1].CopyFrom(onnx.numpy_helper.from_array(table, "w"))
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 23)])
    onnx.checker.check_model(model, full_check=True)
    (logits,) = ReferenceEvaluator(model).run(None, {"token_ids": np.array([3, 0], np.int32)})
    np.testing.assert_array_equal(logits, table[[3, 0], 2:].reshape(2, 2, 3))
