"""Writes the fused graph of an engine as ONNX, for viewers and for TensorRT. See README.md.

What becomes what:

- An IR op is exactly one node: an op of the ONNX standard where one says the same for its dtypes, ranks and
  attributes (Gemm, Gather, Add, RMSNormalization, ...), else the op of the same name in the domain `tapeout`.
- A window of a value is a chain of Reshape, Slice and Transpose in front of the node that reads it.
- Weights are external data: byte ranges of the engine or of its shared weight file. Nothing is copied.
- Step tensors that ops change in place (the KV pool) are threaded: each op takes the tensor and returns the
  changed one; the last is the graph's output `kv_pool_out`. An engine does not copy: both are one memory.
- Names are those of the IR and of the launch program; a node's metadata name its record and its tactics.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import onnx
from onnx import helper

from tapeout.compiler.cuda_plan import ROW_MULTIPLE
from tapeout.compiler.ir import IR_TEXT, IR_VERSION, Module, parse
from tapeout.compiler.onnx_export.graph import TensorFile, build_graph
from tapeout.compiler.onnx_export.op_schemas import DOMAIN, DOMAIN_VERSION, register_op_schemas
from tapeout.compiler.onnx_export.standard_ops import OPSET
from tapeout.compiler.plan import plan_program
from tapeout.plugins.errors import EngineCorruptError, EngineError, TapeoutError, UsageError
from tapeout.runtime.engine import Engine, open_engine

__all__ = ["export_engine", "register_op_schemas"]


def export_engine(engine_path: Path, out_path: Path) -> None:
    """Write the fused graph of an engine to `out_path` as an ONNX model that refers to the engine's weights.

    The model holds for as long as the engine stays where it is, relative to the ONNX file. Equal engines of
    equal names give equal bytes. Nothing appears under `out_path` when anything fails.

    Raises:
        UsageError: `out_path` cannot be written, is the engine itself, or lies where no relative path without
            ".." leads to the weights (ONNX refuses all others, and files with several hard links).
        EngineError: the engine holds no graph; EngineCorruptError: it does not fit the launch program.
        UnsupportedError: the graph cannot be expressed in ONNX.
    """
    out_path = Path(out_path)
    with open_engine(engine_path, verify=False) as engine:
        _check_target(out_path, engine)
        module = _read_module(engine)
        files = _tensor_files(module, engine, out_path)
        graph = build_graph(module, engine.program, engine.manifest, files)
        model = _model(graph, module, engine)
    _write(model, out_path)


def _check_target(out_path: Path, engine: Engine) -> None:
    if not out_path.parent.is_dir() or out_path.is_dir():
        what = "is a directory" if out_path.is_dir() else "lies in no existing directory"
        raise UsageError(f"{out_path} {what}, expected the path of an ONNX file to write")
    if out_path.resolve() in {file.resolve() for file in engine.files}:
        raise UsageError(
            f"{out_path} is a file of the engine {engine.path} and would be overwritten",
            hint=f"choose another name, for example {engine.path.with_suffix('.onnx').name}",
        )


def _read_module(engine: Engine) -> Module:
    """The IR, proven to be what the launch program was planned from."""
    if IR_TEXT not in engine.text_names:
        found = ", ".join(engine.text_names) or "no texts"
        raise EngineError(
            f"{engine.path} holds no graph (text {IR_TEXT!r}); it has {found}",
            hint="build the engine again: tapeout build MODEL",
        )
    try:
        module = parse(engine.text(IR_TEXT).decode())
        # The program is covered by checksums that were compared on opening, the text is not.
        padded = ROW_MULTIPLE if engine.manifest.target.startswith("cuda:") else 1
        planned = plan_program(module, engine.manifest.limits, engine.program.tactics, row_multiple=padded)
    except (ValueError, KeyError) as error:
        raise EngineCorruptError(f"{engine.path}: the graph ({IR_TEXT}) cannot be read: {error}") from None
    program = engine.program
    if (planned.records, planned.logits) != (program.records, program.logits):
        raise EngineCorruptError(f"{engine.path}: the graph ({IR_TEXT}) is not the one its program came from")
    return module


def _tensor_files(module: Module, engine: Engine, out_path: Path) -> dict[str, TensorFile]:
    """Where each weight lies. The last of the engine's files holds them all."""
    location = _relative(engine.files[-1], out_path)
    files = {}
    for name, kind in module.weights.items():
        info = engine.weights.get(name)
        if info is None or (info.dtype, info.shape) != (kind.dtype, kind.shape):
            raise EngineCorruptError(f"{engine.path}: weight {name} is {info}, its graph says {kind}")
        files[name] = TensorFile(location, info.begin, info.size_bytes)
    return files


def _relative(weights: Path, out_path: Path) -> str:
    # Resolved, because ONNX follows no symbolic links either.
    target, directory = weights.resolve(), out_path.parent.resolve()
    if not target.is_relative_to(directory):
        raise UsageError(
            f"{out_path} cannot refer to the weights in {target}: ONNX accepts files in or below the model's "
            f"own directory, which is {directory}",
            hint=f"write the ONNX file beside the engine: {target.parent / out_path.name}",
        )
    if target.stat().st_nlink > 1:
        raise UsageError(
            f"{out_path} cannot refer to the weights in {target}: "
            "ONNX accepts no file with several hard links",
            hint="export from a copy of the engine that no other name shares",
        )
    return target.relative_to(directory).as_posix()


def _model(graph: onnx.GraphProto, module: Module, engine: Engine) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    manifest = engine.manifest
    model = helper.make_model(
        graph,
        opset_imports=opsets,
        ir_version=helper.find_min_ir_version_for(opsets, ignore_unknown=True),
        producer_name="tapeout",
        producer_version=version("tapeout"),
        domain=DOMAIN,
        doc_string=(
            f"One step of {manifest.model.architecture}: T packed token rows of B sequences, R rows with "
            "logits. kv_pool_out is kv_pool after the step; an engine changes it in place."
        ),
    )
    facts = {
        "format_version": str(manifest.format_version),
        "ir_version": str(IR_VERSION),
        "ir_digest": module.digest(),
        "engine_digest": engine.digest,
        "target": manifest.target,
        "limits": json.dumps(asdict(manifest.limits)),
        **{key: str(value) for key, value in asdict(manifest.model).items()},
    }
    helper.set_model_props(model, {f"{DOMAIN}.{key}": text for key, text in facts.items()})
    return model


def _write(model: onnx.ModelProto, out_path: Path) -> None:
    """Write, check where it will stand (external data are checked too), then rename."""
    register_op_schemas()
    temporary = out_path.with_name(f".{out_path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(model.SerializeToString(deterministic=True))
        onnx.checker.check_model(temporary, check_custom_domain=True)
        temporary.replace(out_path)
    except OSError as error:
        raise UsageError(f"{out_path} cannot be written: {error.strerror or error}") from None
    except onnx.checker.ValidationError as error:
        raise TapeoutError(f"{out_path} was not written, ONNX does not accept it: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
