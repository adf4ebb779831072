"""Every key of a model's JSON files is used, known to be irrelevant, or an error.

Whether a key of config.json is used is not a list kept by hand: attribute reads are recorded while
transformers' code builds the model and is traced. What nobody reads cannot have an effect, so a value
there would be accepted in silence; the only exceptions stand in `IRRELEVANT`, with reasons.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.sample.params import shown

_TRAINING = "used in training alone"
_OUTPUTS = "chooses what transformers' own code returns"
_LABELS = "describes a classification or summary head that language models do not have"

#: Patterns of keys that no result depends on, with the reason.
IRRELEVANT: Mapping[str, str] = {
    r"(.*_)?(dropout|pdrop|dropout_prob|dropout_rate)(_prob|_rate)?": _TRAINING,
    r".*initializer_(range|factor)": _TRAINING,
    r".*(aux_loss|z_loss|jitter).*|seq_aux|ep_size|gradient_checkpointing|layerdrop|train_.*": _TRAINING,
    r"pretraining_tp|tensor_parallel.*|slow_but_exact": "how training split the sums over machines",
    r"mtp_.*|num_nextn_predict_layers": "layers for drafting that the model itself does not run",
    r"use_cache|output_.*|return_dict.*|torchscript|chunk_size_feed_forward|use_return_dict": _OUTPUTS,
    r"id2label|label2id|num_labels|problem_type|summary_.*|classifier_.*|finetuning_task|task_.*": _LABELS,
    r"architectures|model_type|auto_map|_name_or_path|name_or_path|transformers_version": "names the model",
    r"(torch_)?dtype": "the build's --dtype decides; `auto` reads it",
    r"(bos|eos|pad|sep|cls|unk|mask|decoder_start|image|video|audio)_token(_id|_index)?": "token ids",
    r"(attn|experts|_attn|_experts)_implementation": "tapeout brings its own",
    r"use_bfloat16|tokenizer_class|prefix|(begin_)?suppress_tokens|bad_words_ids": "not the model's",
    r"is_(encoder_)?decoder|add_cross_attention|cross_attention_.*|tie_encoder_decoder": "checked beside",
    r"pruned_heads|unsloth_.*|transformers\.js_config|_commit_hash|license|_flash_attn.*": "notes of tools",
    r"(shared_|shared_expert_|moe_)?intermediate_size|vocab_size_per_layer_input": "of layers not there",
    r"rope_(theta|scaling|parameters)|partial_rotary_factor|rotary_(pct|emb_base)": "read as rope_parameters",
}
_IRRELEVANT = re.compile("|".join(f"(?:{p})" for p in IRRELEVANT))
#: Reasons that hold for a key whether anything reads it or not.
_NEVER_MATTERS = {
    _TRAINING, _OUTPUTS, _LABELS, "how training split the sums over machines", "token ids", "notes of tools",
    "the build's --dtype decides; `auto` reads it", "tapeout brings its own", "not the model's",
}  # fmt: skip
_COSMETIC = re.compile(
    "|".join(f"(?:{p})" for p, reason in IRRELEVANT.items() if reason in _NEVER_MATTERS)
    + r"|_name_or_path|name_or_path|transformers_version"
)

#: Keys of rope_parameters and rope_scaling that transformers' frequencies are made from.
ROPE_KEYS = frozenset({
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor",
    "partial_rotary_factor", "mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta", "alpha",
    "max_position_embeddings",
})  # fmt: skip

#: Keys of generation_config.json that become sampling defaults or token ids of the engine.
GENERATION_USED = frozenset({
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens",
    "do_sample", "eos_token_id", "bos_token_id", "pad_token_id",
})  # fmt: skip
#: ... and those that say nothing about tokens, with the reason.
GENERATION_IRRELEVANT: Mapping[str, str] = {
    r"_from_model_config|transformers_version|_.*": "notes of transformers",
    r"max_length|min_length": "the engine's limits and max_tokens hold",
    r"use_cache|cache_implementation|cache_config|return_.*|output_.*|compile_config": _OUTPUTS,
    r"decoder_start_token_id|prefill_chunk_size|low_memory|disable_compile|continuous_batching_.*": _OUTPUTS,
    r"(assistant|prompt_lookup|num_assistant|is_assistant|speculative|target_lookbehind).*": "for drafting",
    r"trust_remote_code|chat_format|user_token_id|assistant_token_id|max_window_size": "notes of tools",
}
_GENERATION_IRRELEVANT = re.compile("|".join(f"(?:{p})" for p in GENERATION_IRRELEVANT))


@contextmanager
def recording_reads(config: Any) -> Iterator[set[str]]:
    """Names of attributes that are read from configs of this class meanwhile."""
    kind: Any = type(config)
    names: set[str] = set()
    before: Any = kind.__getattribute__

    def record(self: Any, name: str) -> Any:
        names.add(name)
        return before(self, name)

    own = "__getattribute__" in vars(kind)
    kind.__getattribute__ = record
    try:
        yield names
    finally:
        if own:
            kind.__getattribute__ = before
        else:
            del kind.__getattribute__


def check_config_use(raw: Mapping[str, Any], config: Any, read: Collection[str], where: str) -> None:
    """UnsupportedError for keys with a value that had no effect on the model.

    Args:
        raw: config.json as it is. config: what transformers made of it.
        read: attributes that were read while the model was built and traced.
        where: the file, for the message.
    """
    aliases = getattr(config, "attribute_map", {})
    used = {aliases.get(name, name) for name in read} | set(read) | _handled_by_class(_class(config))
    defaults = class_defaults(_class(config))
    unused = [
        f"  {key} = {shown(value)}"
        for key, value in raw.items()
        if value is not None
        and defaults.get(key, _NOTHING) != value
        and aliases.get(key, key) not in used
        and key not in used
        and not _IRRELEVANT.fullmatch(key)
        and getattr(config, key, value) == value  # else the class turned it off: it says what holds
    ]
    unused += _unknown_rope_keys(raw)
    if unused:
        raise UnsupportedError(
            f"{where} has keys that nothing in transformers' {config.model_type} code reads, so they would "
            "be ignored in silence:\n" + "\n".join(unused),
            hint="correct the key's name or remove it from config.json; keys that never matter are listed in "
            "model_defs/config_use.py",
        )


def check_generation_use(generation: Mapping[str, Any], where: str) -> None:
    """UnsupportedError for settings that would change tokens and are not applied."""
    from transformers import GenerationConfig

    neutral = GenerationConfig().to_dict()
    unused = [
        f"  {key} = {shown(value)}"
        for key, value in generation.items()
        if value is not None
        and key not in GENERATION_USED
        and not _GENERATION_IRRELEVANT.fullmatch(key)
        and (key not in neutral or value not in (neutral[key], *_OFF))
    ]
    if unused:
        raise UnsupportedError(
            f"{where} has settings that no request could follow:\n" + "\n".join(unused),
            hint="remove them to build without; the engine's answers would differ from transformers'",
        )


_OFF: tuple[Any, ...] = (False, 0, 0.0, 1, 1.0, [], {}, "")  # of penalties, counts of beams and lists


def _unknown_rope_keys(raw: Mapping[str, Any]) -> list[str]:
    unknown = []
    for name in ("rope_parameters", "rope_scaling"):
        value = raw.get(name)
        if not isinstance(value, dict):
            continue
        nested = {k: v for k, v in value.items() if isinstance(v, dict)}  # by layer type
        for path, part in [(f"{name}.{k}", v) for k, v in nested.items()] or [(name, value)]:
            unknown += [f"  {path}.{k} = {shown(v)}" for k, v in part.items() if k not in ROPE_KEYS]
    return unknown


def is_cosmetic(key: str) -> bool:
    """Whether a key of config.json can differ without making another graph."""
    return _COSMETIC.fullmatch(key) is not None


_NOTHING = object()


def _class(config: Any) -> type:
    return type(config)


@cache
def class_defaults(kind: type) -> Mapping[str, Any]:
    """Values that the config class has anyway: to state one of them changes nothing."""
    try:
        values: Mapping[str, Any] = kind().to_dict()
    except Exception:  # a class of remote code may want arguments
        return {}
    return values


@cache
def _handled_by_class(kind: type) -> frozenset[str]:
    """Keys that the config class's own methods name: it turns them into what the model's code reads."""
    names: set[str] = set()
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__)
        if module is None or not base.__module__.startswith("transformers.models."):
            continue
        for node in ast.walk(ast.parse(inspect.getsource(base))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    names.add(part.value)
                elif isinstance(part, ast.Attribute):
                    names.add(part.attr)
    return frozenset(names)
