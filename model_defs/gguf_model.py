"""A `.gguf` file as a ModelSource: config, weights, tokenizer and chat template from inside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tapeout.model_defs.gguf_checkpoint import GgufCheckpoint
from tapeout.model_defs.gguf_config import config_values, head_counts
from tapeout.model_defs.gguf_families import CONFIG_TENSORS, GgufFamily, family_of
from tapeout.model_defs.gguf_file import GgufFile, read_gguf
from tapeout.model_defs.gguf_tensors import HeadCounts, Made
from tapeout.model_defs.gguf_tokenizer import load_gguf_tokenizer
from tapeout.model_defs.source import ModelSource, TensorInfo
from tapeout.model_defs.tokenizer import NO_TOKENIZER, tokenizer_parts
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import UsageError


def open_gguf(path: Path) -> ModelSource:
    """Open a GGUF file. Seconds, and nothing of its weights is read.

    Errors: UsageError (not a GGUF, truncated, damaged, missing metadata or tensors, all at once);
    UnsupportedError (architecture, tensor type, rope scaling or pre-tokenizer).
    """
    from transformers import CONFIG_MAPPING

    file = read_gguf(path)
    family = family_of(file)
    kind = CONFIG_MAPPING[family.model_type]
    config = kind(**config_values(file, family, kind))
    config.architectures = [_causal_lm_name(config)]
    names, recipes = _places(file, family, config)
    checkpoint = GgufCheckpoint(file, names, family, HeadCounts(*head_counts(file)))
    tokenizer = load_gguf_tokenizer(file)
    parts = tokenizer_parts(tokenizer) if tokenizer is not None else NO_TOKENIZER
    if parts.vocab_size > config.vocab_size:
        raise UsageError(
            f"{path}: the tokenizer has {parts.vocab_size} tokens, the model's vocabulary {config.vocab_size}"
        )
    return ModelSource(
        origin=f"gguf:{file.quantization}",
        config=config,
        checkpoint=checkpoint,
        tokenizer_json=parts.json_text,
        tokenizer_vocab_size=parts.vocab_size,
        chat_template=parts.chat_template,
        special_tokens=parts.special_tokens,
        generation={},
        eos_token_ids=_end_ids(file),
        bos_token_id=parts.bos_token_id,
        pad_token_id=parts.pad_token_id,
        trust_remote_code=False,
        hf_path=str(path),
        files=(path,),
        recipes=recipes,
    )


def _end_ids(file: GgufFile) -> tuple[int, ...]:
    """Ids that end a generation: a GGUF file names end of text, of turn and of message apart.

    HF's generation config would list them all; with the first alone a Gemma chat never stops.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (file.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _causal_lm_name(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])


def _places(file: GgufFile, family: GgufFamily, config: Any) -> tuple[dict[str, str], dict[str, WeightRef]]:
    """GGUF name by checkpoint name, and recipes of the parameters that are made from such tensors.

    Both sides must be used up. HF's names come from the model itself on the meta device, so no name is
    guessed.
    """
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == family.name_table)
    table = get_tensor_name_map(arch, config.num_hidden_layers)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).state_dict()
    names: dict[str, str] = {}
    recipes: dict[str, WeightRef] = {}
    missing: list[str] = []
    for hf_name in parameters:
        made, parts = _rule(family, hf_name)
        gguf_names = parts if made else (_gguf_name(table, hf_name),)
        absent = [name for name in gguf_names if name not in file.tensors]
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if absent:
            missing += [f"  missing: {name} ({hf_name})" for name in absent]
        elif made:
            names |= {name: name for name in gguf_names}
            recipes[hf_name] = made([_float32(file, name) for name in gguf_names])
        else:
            names[hf_name] = gguf_names[0]
    unused = sorted(file.tensors.keys() - set(names.values()) - CONFIG_TENSORS.keys())
    if missing or unused:
        lines = [*dict.fromkeys(missing), *(f"  not known to {config.model_type}: {name}" for name in unused)]
        raise UsageError(
            f"{file.path}: its tensors do not match architecture {file.architecture!r}:\n" + "\n".join(lines),
            hint="the file is incomplete or from a converter this architecture's table does not cover",
        )
    return names, recipes


def _rule(
    family: GgufFamily, hf_name: str
) -> tuple[Callable[[list[WeightRef]], WeightRef] | None, tuple[str, ...]]:
    """How a parameter is made and from which GGUF tensors; None for one that is a tensor as it is."""
    for rule in family.made:
        if (found := rule.match(hf_name)) is not None:
            parts, numbers = found
            return partial(_build, rule, numbers), parts
    return None, ()


def _build(rule: Made, numbers: tuple[int, ...], refs: list[WeightRef]) -> WeightRef:
    return rule.build(refs, numbers)


def _gguf_name(table: Any, hf_name: str) -> str:
    """By the gguf package's table; BLOOM's names stand there without the model's prefix."""
    short = hf_name.removeprefix("transformer.")
    found = (table.get_name(name, try_suffixes=(".weight", ".bias")) for name in (hf_name, short))
    return next((name for name in found if name is not None), f"? for {hf_name}")


def _float32(file: GgufFile, name: str) -> WeightRef:
    return WeightRef.of(TensorInfo(name, "float32", file.tensors[name].shape))
