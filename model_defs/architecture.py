"""Which models can be built at all, decided from the config before anything heavy happens."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tapeout.plugins.errors import UnsupportedError, UsageError

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
MAX_POSITIONS = 1 << 20  # where a config says nothing
#: Rope types whose frequencies follow the length of the sequence; an engine has those of its longest one.
ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})


def check_supported(config: Any, where: str | Path, *, trust_remote_code: bool) -> None:
    """Raise unless `config` is a decoder-only text model with attention in every layer.

    Errors: UnsupportedError naming model_type, architectures and everything that is missing;
    UsageError when the model needs its own code and that was not allowed.
    """
    model_class = causal_lm_class(config)
    if model_class is None:
        if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
            require_remote_code(where, config.model_type, trust_remote_code)
        else:
            raise _unsupported(
                config, where, ["transformers has no causal language model for this model_type"]
            )
    reasons = list(_reasons(config, model_class))
    if reasons:
        raise _unsupported(config, where, reasons)


def require_remote_code(where: str | Path, model_type: str, trust_remote_code: bool) -> None:
    """UsageError when a model that comes with its own Python code may not run it."""
    if not trust_remote_code:
        raise UsageError(
            f"{where}: model_type {model_type!r} is not part of transformers and brings its own Python code",
            hint="read that code, then allow it with --trust-remote-code",
        )


def causal_lm_class(config: Any) -> Any:
    """Transformers' class of the causal language model of a config; None where it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def base_model_prefix(config: Any) -> str:
    """HF's attribute name of the model below the head (`model`, `transformer`), "" when unknown."""
    model_class = causal_lm_class(config)
    return "" if model_class is None else str(model_class.base_model_prefix)


def _reasons(config: Any, model_class: Any) -> list[str]:
    """Everything that stands against building this model; `model_class` is None for remote code."""
    reasons: list[str] = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder; only decoder-only models are supported")
    if config.get_text_config(decoder=True) is not config:
        parts = [name for name in getattr(config, "sub_configs", {}) if name != "text_config"]
        reasons.append(
            f"it is multimodal ({', '.join(parts) or 'nested configs'}); only text models are supported"
        )
    layer_types = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYER_TYPES
    if layer_types:
        reasons.append(
            f"layers of type {', '.join(sorted(layer_types))}; "
            f"supported are {', '.join(sorted(ATTENTION_LAYER_TYPES))}"
        )
    elif getattr(model_class, "_is_stateful", False):
        reasons.append("it keeps a recurrent state; only models whose state is a KV cache are supported")
    reasons += _rope_reasons(config, model_class)
    if getattr(config, "is_decoder", True) is False and _can_be_an_encoder(model_class):
        reasons.append("it is an encoder (is_decoder is false); only causal models are supported")
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        )
        reasons.append(
            f"its weights are quantized ({getattr(method, 'value', method)}); only plain ones are supported"
        )
    architectures = getattr(config, "architectures", None) or []
    if model_class is not None and architectures:
        causal = model_class.__name__
        base = causal.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model"
        if causal not in architectures and base not in architectures:
            reasons.append(f"its architecture is {', '.join(architectures)}, expected {causal}")
    return reasons


def calls_interface(config: Any) -> bool:
    """Whether the model's attention goes through transformers' AttentionInterface."""
    model_class = causal_lm_class(config)
    return model_class is None or hasattr(_module(model_class), "ALL_ATTENTION_FUNCTIONS")


def written_attention(config: Any) -> str:
    """The attention that a model runs by default where it writes it out, `sdpa` or `eager`.

    One of the two is what users of transformers get, and the other may differ: Falcon's `eager` adds ALiBi
    twice (transformers 5.24).
    """
    model_class = causal_lm_class(config)
    known = not calls_interface(config) and getattr(model_class, "_supports_sdpa", False)
    return "sdpa" if known else "eager"


def max_positions(config: Any) -> int:
    """The longest sequence the model is made for; models without such a limit (ALiBi) get MAX_POSITIONS."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    return MAX_POSITIONS


def _module(model_class: Any) -> ModuleType:
    return sys.modules[model_class.__module__]


def _can_be_an_encoder(model_class: Any) -> bool:
    """Whether the model's code looks at `is_decoder`; some decoders' configs say False and mean nothing."""
    if model_class is None:
        return True
    lines = inspect.getsource(_module(model_class)).splitlines()
    return any("config.is_decoder" in line and ">>>" not in line for line in lines)  # examples set it


def _rope_reasons(config: Any, model_class: Any) -> list[str]:
    """Rope types that transformers does not know."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or model_class is None:
        return []
    own = {"rope_parameters": parameters}
    by_layer = {f"rope_parameters.{key}": v for key, v in parameters.items() if isinstance(v, dict)}
    reasons = []
    for key, value in (own | by_layer).items():
        rope_type = value.get("rope_type", "default")
        if rope_type == "default":
            continue
        if not isinstance(rope_type, str) or rope_type not in ROPE_INIT_FUNCTIONS:
            known = sorted({"default", *ROPE_INIT_FUNCTIONS})
            reasons.append(f"{key}: rope_type {rope_type!r} is unknown, expected one of {', '.join(known)}")
    return reasons


def _unsupported(config: Any, where: str | Path, reasons: list[str]) -> UnsupportedError:
    architectures = ", ".join(getattr(config, "architectures", None) or []) or "none named"
    return UnsupportedError(
        f"{where}: model_type {config.model_type!r} (architectures: {architectures}) is not supported:\n"
        + "\n".join(f"  {reason}" for reason in reasons),
        hint="supported are decoder-only text models of transformers with attention in every layer, "
        "for example llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3, smollm3",
    )
