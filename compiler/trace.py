"""Trace unmodified Hugging Face modeling code into a graph, without its weights.

The model lives on the meta device. Attention goes through the library's own
AttentionInterface to the custom op `tapeout::attention`; masks are classified instead of
built; inputs are packed `[1, T]` with dynamic T, and only the rows in `row_ids` reach the
LM head.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tapeout.compiler import experts as _experts  # noqa: F401 (registers the experts interface)
from tapeout.compiler.graph import Graph, to_numpy, weight_placeholder
from tapeout.compiler.masks import MarkOnes, Mask, classify, hides_nothing
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import TapeoutError, UnsupportedError

#: How a parameter of the model, by its HF name, is made from checkpoint tensors.
FindWeight = Callable[[str], WeightRef]

INTERFACE = "tapeout"  # the name under which attention and masks are registered
_PREFIX = "model_under_trace."

# Arguments of attention functions that do not change the result of packed causal attention.
_HARMLESS = frozenset({
    "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "is_causal", "logits_to_keep",
    "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict",
    "training", "use_cache",
})  # fmt: skip


@dataclass
class _Recorder:
    """What the registered functions see while the model runs under export."""

    positions: torch.Tensor | None = None
    layers: list[int] = field(default_factory=list)
    cached: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


_active: list[_Recorder] = []


class _NoCache:
    """Stand-in for a KV cache: nothing is kept, and no packed-sequence mask is wrapped around
    the mask function, which is then a pure function of positions."""

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, q_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return q_length, 0

    def update(
        self, k: torch.Tensor, v: torch.Tensor, layer_idx: int = 0, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _active[-1].cached[layer_idx] = k, v
        return k, v


def _mask_interface(
    *_: Any, mask_function: Any, attention_mask: Any = None, **__: Any
) -> Mask | UnsupportedError:
    """A mask, or why it is none: models make masks that no layer uses."""
    if attention_mask is not None and not hides_nothing(attention_mask):
        return UnsupportedError(
            "the model builds its own padding mask", hint="packed inputs carry no padding"
        )
    try:
        return classify(mask_function)
    except UnsupportedError as error:
        return error


def _attention_interface(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | UnsupportedError | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Called by HF in place of attention: q `[1, Hq, T, D]` -> `[1, T, Hq, D]`."""
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _HARMLESS)
    if unknown:
        raise UnsupportedError(
            f"attention of {type(module).__name__} takes arguments that are not known: {unknown}"
        )
    latents = hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")
    if not latents and not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        sizes = [x.shape[-1] for x in (query, key, value)]
        raise UnsupportedError(
            f"attention of {type(module).__name__} has heads of sizes {sizes} for queries, keys and values",
            hint="heads that differ in size are supported where the cache holds latents",
        )
    if isinstance(attention_mask, UnsupportedError):
        raise attention_mask
    if not isinstance(attention_mask, Mask):
        raise UnsupportedError(
            f"attention of {type(module).__name__} got no classified mask but {attention_mask!r}"
        )
    if sliding_window is not None and attention_mask.window not in (0, sliding_window):
        raise UnsupportedError(
            f"layer {module.layer_idx}: mask has window {attention_mask.window}, "
            f"the layer says {sliding_window}"
        )
    recorder = _active[-1]
    assert recorder.positions is not None
    recorder.layers.append(int(module.layer_idx))
    if latents:
        if softcap or s_aux is not None:
            raise UnsupportedError(
                f"attention of {type(module).__name__} over latents has a softcap or sinks"
            )
        return _over_latents(module, query, value, scaling, attention_mask.window), None
    out = torch.ops.tapeout.attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        recorder.positions,
        None,
        s_aux,
        int(module.layer_idx),
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        attention_mask.window,
        float(softcap or 0.0),
        False,
    )
    return out, None


def _over_latents(
    module: nn.Module, query: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int
) -> torch.Tensor:
    """Multi-head latent attention: what the module gave to its cache is attended over as it is.

    `kv_b_proj` would make every head's keys and values of the latents; queries and results go through it
    instead. q `[1, H, T, N + P]` -> `[1, T, H, V]`.
    """
    recorder = _active[-1]
    latent, k_rot = recorder.cached[int(module.layer_idx)]
    heads, rotary = query.shape[1], k_rot.shape[-1]
    nope, weight = query.shape[-1] - rotary, module.kv_b_proj.weight
    if module.kv_b_proj.bias is not None or weight.shape[0] != heads * (nope + value.shape[-1]):
        raise UnsupportedError(
            f"attention of {type(module).__name__} expands its latents by more than one matrix: "
            f"kv_b_proj is {list(weight.shape)}, queries {list(query.shape)}, values {list(value.shape)}"
        )
    up = weight.view(heads, nope + value.shape[-1], weight.shape[1])
    rows = query.transpose(1, 2)
    out: torch.Tensor = torch.ops.tapeout.latent_attention(
        rows[..., :nope],
        rows[..., nope:],
        latent[:, 0],
        k_rot[:, 0],
        recorder.positions,
        up[:, :nope],
        up[:, nope:],
        int(module.layer_idx),
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window,
    )
    return out


def _written_mask(
    *_: Any, mask_function: Any, attention_mask: Any = None, dtype: torch.dtype = torch.float32, **__: Any
) -> torch.Tensor:
    """The mask of models that write their attention out: a tensor, as they expect."""
    positions = _active[-1].positions
    assert positions is not None
    if attention_mask is not None and not hides_nothing(attention_mask):
        raise UnsupportedError("the model builds its own padding mask", hint="packed inputs carry no padding")
    name = str(dtype).removeprefix("torch.")
    mask: torch.Tensor = torch.ops.tapeout.causal_mask(positions, classify(mask_function).window, name)
    return mask


@contextmanager
def _masks_as_tensors() -> Iterator[None]:
    """Hugging Face's eager masks become `tapeout::causal_mask`."""
    before = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    ALL_MASK_ATTENTION_FUNCTIONS.register("eager", _written_mask)
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS.register("eager", before)


ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _attention_interface)
ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE, _mask_interface)


class _Wrapper(nn.Module):
    """The signature that is exported: packed ids and positions, and the rows that are sampled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model_under_trace = model
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.arguments = set(parameters)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, row_ids: torch.Tensor
    ) -> torch.Tensor:
        _active[-1].positions = positions
        given = {"position_ids": positions, "logits_to_keep": row_ids, self.cache_argument: _NoCache()}
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
    layers = model.config.get_text_config().num_hidden_layers
    with _recording() as recorder, _without_storage(model) as buffers:
        if model.config._attn_implementation == INTERFACE:
            program = _export(_Wrapper(model))
            _check_layers(model, layers, recorder.layers)
        else:  # a pass counts the attention that is written out
            with _masks_as_tensors():
                program = _export(_Wrapper(model))
        return _to_graph(program, model, layers, parameter, buffers)


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


@contextmanager
def _recording() -> Iterator[_Recorder]:
    _active.append(_Recorder())
    try:
        yield _active[-1]
    finally:
        _active.pop()


def _export(wrapper: _Wrapper) -> ExportedProgram:
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
    except TapeoutError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, TapeoutError):
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
    model: nn.Module,
    layers: int,
    parameter: FindWeight,
    buffers: dict[str, torch.Tensor],
) -> Graph:
    module = program.graph_module
    signature = program.graph_signature
    weights: dict[str, WeightRef] = {}
    constants: dict[str, np.ndarray] = {}
    parameters = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
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
            name = parameters[node.target].removeprefix(_PREFIX)
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


def _inputs_first(graph: fx.Graph, inputs: list[fx.Node]) -> None:
    """Order placeholders: step inputs, then weights."""
    for node in reversed(inputs):
        first = next(iter(graph.nodes))
        if first is not node:
            first.prepend(node)
