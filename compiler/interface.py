"""What Hugging Face's modeling code calls while it is traced: attention, masks, a cache that keeps nothing.

Attention goes through the library's AttentionInterface to `tapeout::attention`, over latents to
`tapeout::latent_attention`; masks are classified instead of built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tapeout.compiler.masks import Mask, classify, hides_nothing
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.registry import register_torch_ops

register_torch_ops()

#: The name under which attention and masks are registered.
INTERFACE = "tapeout"
# Arguments of attention functions that do not change the result of packed causal attention.
_HARMLESS = frozenset({
    "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "is_causal", "logits_to_keep",
    "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict",
    "training", "use_cache",
})  # fmt: skip


@dataclass
class Recorder:
    """What the registered functions see while the model runs under export."""

    positions: torch.Tensor | None = None
    layers: list[int] = field(default_factory=list)
    cached: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


_active: list[Recorder] = []


class NoCache:
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
def masks_as_tensors() -> Iterator[None]:
    """The masks of Hugging Face's `eager` and `sdpa` become `tapeout::causal_mask`."""
    before = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("eager", "sdpa")}
    for name in before:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _written_mask)
    try:
        yield
    finally:
        for name, function in before.items():
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, function)


@contextmanager
def recording() -> Iterator[Recorder]:
    """While open, the registered functions tell this recorder what they see."""
    _active.append(Recorder())
    try:
        yield _active[-1]
    finally:
        _active.pop()


ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _attention_interface)
ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE, _mask_interface)
