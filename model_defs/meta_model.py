"""The HF module tree on the meta device: shapes and code of a model, no weights."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from tapeout.model_defs.architecture import ROPE_BY_LENGTH, max_positions
from tapeout.plugins.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tapeout.model_defs.source import ModelSource


def load_meta_model(
    source: ModelSource,
    dtype: str | torch.dtype,
    attn_implementation: str,
    max_seq_len: int | None = None,
) -> nn.Module:
    """The source's causal LM with every parameter on the meta device, in eval mode.

    Non-persistent buffers (inverse frequencies, embedding scales) are real and on the CPU: no
    checkpoint holds them, so they are recomputed by HF's own `_init_weights`. The config object is
    copied, because HF writes the attention implementation into it.

    Args:
        dtype: of the parameters, `float32`, `bfloat16`, `float16` or a torch dtype.
        attn_implementation: a name registered with HF's AttentionInterface, or `eager` / `sdpa`.
        max_seq_len: longest sequence to come; rotary frequencies that depend on the length are those of
            this one (None: of the longest the model is made for).

    Errors: UnsupportedError when HF's code cannot build the model from its config or leaves a
    buffer without a value.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(source.config)
    kwargs: dict[str, Any] = {"dtype": _torch_dtype(dtype), "attn_implementation": attn_implementation}
    if attn_implementation not in ("eager", "sdpa"):
        kwargs["experts_implementation"] = attn_implementation
    if source.trust_remote_code:
        kwargs["trust_remote_code"] = True
        config.name_or_path = source.hf_path  # where HF looks for the model's code
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **kwargs)
    except (ValueError, NotImplementedError, ImportError, AttributeError, KeyError, TypeError) as error:
        raise UnsupportedError(
            f"transformers cannot build model_type {config.model_type!r} from its config: {error}",
            hint="check config.json against the model's original one",
        ) from error
    _fill_non_persistent_buffers(model)
    _fix_frequencies(model, max_seq_len or max_positions(config.get_text_config()))
    return model.eval()


def expected_tensors(model: nn.Module) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Arguments for `check_checkpoint`: shapes of all persistent tensors, and the tied ones' sources."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return shapes, dict(getattr(model, "all_tied_weights_keys", None) or {})


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(known)}")
    return known[dtype]


def _fill_non_persistent_buffers(model: nn.Module) -> None:
    """Give every non-persistent meta buffer its value on the CPU, or raise UnsupportedError.

    Buffers start as NaN (-1 in integers) so that one HF's code does not fill is seen.
    """
    import torch

    filled: list[tuple[str, torch.Tensor]] = []
    for module_name, module in model.named_modules():
        names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
        if not names:
            continue
        for name in names:
            old = module._buffers[name]
            assert old is not None
            value = float("nan") if old.is_floating_point() else (False if old.dtype == torch.bool else -1)
            module._buffers[name] = torch.full(old.shape, value, dtype=old.dtype, device="cpu")
        with torch.no_grad():
            model._init_weights(module)
        for name in names:
            buffer = module._buffers[name]
            assert buffer is not None
            filled.append((f"{module_name}.{name}", buffer))
    if unset := [name for name, buffer in filled if _is_unset(buffer)]:
        raise UnsupportedError(
            f"{type(model).__name__} has buffers that are in no checkpoint and that transformers does not "
            f"recompute on the meta device: {', '.join(unset)}"
        )


def _fix_frequencies(model: nn.Module, max_seq_len: int) -> None:
    """Choose once what transformers chooses in every forward pass by the longest position in the batch.

    longrope: short factors up to the original context, long ones beyond. dynamic: up to the model's own
    length the frequencies it begins with.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer.items():
            prefix = "" if layer_type is None else f"{layer_type}_"
            if kind == "longrope":
                given = {} if layer_type is None else {"layer_type": layer_type}
                inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](
                    module.config, "cpu", seq_len=max_seq_len, **given
                )
                setattr(module, f"{prefix}inv_freq", inv_freq)
                setattr(module, f"{prefix}attention_scaling", scaling)
            if kind in ROPE_BY_LENGTH:
                by_layer[layer_type] = "default"
        if isinstance(kinds, str):
            module.rope_type = by_layer[None]


def _is_unset(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return buffer.numel() > 0 and bool((buffer == -1).all())
