"""Trace unmodified Hugging Face modeling code into a graph, without its weights.

The model lives on the meta device; what its code calls for attention and masks is ours (`interface.py`).
Inputs are packed `[1, T]` with dynamic T, and only the rows in `row_ids` reach the LM head. Layers that are
alike are traced once (`repeated_layers.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram

from tapeout.compiler import experts as _experts  # noqa: F401 (registers the experts interface)
from tapeout.compiler.graph import Graph, to_numpy, weight_placeholder
from tapeout.compiler.interface import INTERFACE, NoCache, Recorder, masks_as_tensors, recording
from tapeout.compiler.masks import MarkOnes
from tapeout.compiler.repeated_layers import (
    Layers,
    NotRepeated,
    expand,
    find_layers,
    from_the_library,
    skipping,
)
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import TapeoutError, UnsupportedError

#: How a parameter of the model, by its HF name, is made from checkpoint tensors.
FindWeight = Callable[[str], WeightRef]

_PREFIX = "model_under_trace."


class _Wrapper(nn.Module):
    """The signature that is exported: packed ids and positions, and the rows that are sampled."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        super().__init__()
        self.model_under_trace = model
        self.recorder = recorder
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.arguments = set(parameters)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, row_ids: torch.Tensor
    ) -> torch.Tensor:
        self.recorder.positions = positions
        given = {"position_ids": positions, "logits_to_keep": row_ids, self.cache_argument: NoCache()}
        taken = {name: value for name, value in given.items() if name in self.arguments}
        with MarkOnes():
            model = self.model_under_trace
            logits: torch.Tensor = model(input_ids=token_ids, use_cache=False, **taken).logits
        return logits if "logits_to_keep" in taken else logits[:, row_ids]


def trace(model: nn.Module, parameter: FindWeight) -> Graph:
    """Trace a causal LM on the meta device whose attention implementation is INTERFACE.

    Args:
        parameter: how a parameter of the model is made from checkpoint tensors.

    Raises:
        UnsupportedError: the code cannot be exported, or its attention is not understood.
    """
    count = model.config.get_text_config().num_hidden_layers
    layers = find_layers(model, count) if from_the_library(model) else None
    with _without_storage(model) as buffers:
        exported = None
        if layers is not None:
            with suppress(NotRepeated, UnsupportedError):  # what the whole trace says of it is told
                exported = _export_repeated(model, layers)
        program, parameters, seen = exported or _export(model)
        if model.config._attn_implementation == INTERFACE:  # else a pass counts attention: it is written out
            _check_layers(model, count, seen)
        return _to_graph(program, parameters, model, count, parameter, buffers)


def _check_layers(model: nn.Module, layers: int, seen: list[int]) -> None:
    if twice := sorted({layer for layer in seen if seen.count(layer) > 1}):
        raise UnsupportedError(
            f"{type(model).__name__} attends more than once in layers {', '.join(map(str, twice))}; "
            "a layer has one attention and one place in the cache",
            hint="differential attention (DiffLlama) is not supported",
        )
    if sorted(seen) != list(range(layers)):
        raise UnsupportedError(
            f"{type(model).__name__} has {layers} layers but its attention was seen in layers {sorted(seen)}",
            hint="models with layers that are not attention, or with attention outside the library's "
            "AttentionInterface, are not supported",
        )


@contextmanager
def _without_storage(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The model's buffers by name; while it is traced, parameters and buffers are CPU tensors without memory.

    On the meta device numbers that the code makes on the way (an index, a lowest value) would be lost.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tables = [t for module in model.modules() for t in (module._parameters, module._buffers)]
    before = [dict(table) for table in tables]
    fakes: dict[int, Any] = {}

    def fake(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in fakes:
            with mode:
                empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            is_parameter = isinstance(value, nn.Parameter)
            fakes[id(value)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
        result: torch.Tensor = fakes[id(value)]
        return result

    try:
        for table in tables:
            table.update({name: None if value is None else fake(value) for name, value in table.items()})
        yield buffers
    finally:
        for table, values in zip(tables, before, strict=True):
            table.update(values)


def _export(model: nn.Module) -> tuple[ExportedProgram, dict[str, str], list[int]]:
    """The exported program, parameters and buffers by placeholder, and the layers whose attention ran."""
    masks = nullcontext() if model.config._attn_implementation == INTERFACE else masks_as_tensors()
    with recording() as recorder, masks:
        program = _export_program(_Wrapper(model, recorder))
    return program, _tensor_names(program), recorder.layers


def _tensor_names(program: ExportedProgram) -> dict[str, str]:
    """The model's name of every parameter and buffer, by placeholder."""
    signature = program.graph_signature
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {target: name.removeprefix(_PREFIX) for target, name in named.items()}


def _export_repeated(model: nn.Module, layers: Layers) -> tuple[ExportedProgram, dict[str, str], list[int]]:
    """As `_export`, with layers that are alike traced once; NotRepeated when that cannot be."""
    with skipping(layers) as calls:
        program, parameters, seen = _export(model)
    lifted = program.graph_signature.inputs_to_lifted_tensor_constants
    constants = {target: program.constants[name] for target, name in lifted.items()}
    expand(program.graph_module.graph, layers, parameters, constants, calls.skipped)
    _in_the_models_order(program.graph_module.graph, parameters, model)
    templates = {kind.template: kind.skipped for kind in layers.kinds}
    return program, parameters, [*seen, *(i for t in seen for i in templates.get(t, ()))]


def _export_program(wrapper: _Wrapper) -> ExportedProgram:
    # Distinct tensors: export takes one tensor given twice for one input.
    token_ids = torch.zeros(1, 7, dtype=torch.int64)
    positions = torch.zeros(1, 7, dtype=torch.int64)
    row_ids = torch.zeros(3, dtype=torch.int64)
    dynamic = {"token_ids": {1: Dim.DYNAMIC}, "positions": {1: Dim.DYNAMIC}, "row_ids": {0: Dim.DYNAMIC}}
    oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # T and R may be 1
    logging.getLogger("torch.export").setLevel(logging.ERROR)
    try:
        with oblivious, torch.no_grad():
            return torch.export.export(
                wrapper, (token_ids, positions, row_ids), dynamic_shapes=dynamic, strict=False
            )
    except (TapeoutError, NotRepeated):
        raise
    except Exception as error:
        if isinstance(error.__cause__, (TapeoutError, NotRepeated)):
            raise error.__cause__ from None
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(
            f"the code of {type(wrapper.model_under_trace).__name__} (model_type "
            f"{wrapper.model_under_trace.config.model_type!r}) cannot be traced yet: "
            f"{type(error).__name__}: {first_line}",
            hint="run with TAPEOUT_TRACEBACK=1 to see where",
        ) from error


def _to_graph(
    program: ExportedProgram,
    parameters: Mapping[str, str],
    model: nn.Module,
    layers: int,
    parameter: FindWeight,
    buffers: dict[str, torch.Tensor],
) -> Graph:
    module = program.graph_module
    signature = program.graph_signature
    weights: dict[str, WeightRef] = {}
    constants: dict[str, np.ndarray] = {}
    persistent = model.state_dict(keep_vars=True)
    fake_mode = None
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        fake_mode = fake_mode or node.meta["val"].fake_mode
        if node.target not in parameters and node.name not in signature.inputs_to_lifted_tensor_constants:
            inputs.append(node)
            continue
        value = node.meta["val"]
        type_, shape_ = str(value.dtype).removeprefix("torch."), tuple(int(s) for s in value.shape)
        if node.target in parameters:
            name = parameters[node.target]
            array = None if name in persistent else buffers[name]
        else:
            name = f"constants.{signature.inputs_to_lifted_tensor_constants[node.name]}"
            array = program.constants[signature.inputs_to_lifted_tensor_constants[node.name]]
        if array is None:
            ref = parameter(name)
            if not ref.steps and isinstance(ref.sources[0], str):
                name = ref.sources[0]  # tied parameters are one tensor, under the checkpoint's name
            weights[name] = ref.cast(type_)
        else:
            weights[name] = WeightRef.const(name, type_, shape_)
            constants[name] = to_numpy(array)
        node._rename(weight_placeholder(name))
        node.target = node.name
        node.meta["weight"] = name
    _inputs_first(module.graph, inputs)
    assert fake_mode is not None
    return Graph(fx.GraphModule(module, module.graph), weights, constants, layers, fake_mode)


def _in_the_models_order(graph: fx.Graph, parameters: Mapping[str, str], model: nn.Module) -> None:
    """Order placeholders of parameters and buffers as export does when it sees all layers."""
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    place = {name: i for i, (name, _) in enumerate(tensors)}
    nodes = [node for node in graph.find_nodes(op="placeholder") if node.target in parameters]
    for node in sorted(nodes, key=lambda n: place[parameters[n.target]], reverse=True):
        _to_front(graph, node)


def _inputs_first(graph: fx.Graph, inputs: list[fx.Node]) -> None:
    """Order placeholders: step inputs, then weights."""
    for node in reversed(inputs):
        _to_front(graph, node)


def _to_front(graph: fx.Graph, node: fx.Node) -> None:
    first = next(iter(graph.nodes))
    if first is not node:
        first.prepend(node)
