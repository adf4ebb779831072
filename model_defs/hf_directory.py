"""A Hugging Face model directory as a ModelSource."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapeout.model_defs.architecture import base_model_prefix, check_supported, require_remote_code
from tapeout.model_defs.check_config import check_generation, check_raw_config, token_ids
from tapeout.model_defs.config_use import check_generation_use
from tapeout.model_defs.hf_checkpoint import INDEX, SINGLE, SafetensorsCheckpoint, open_checkpoint
from tapeout.model_defs.hub import FILES
from tapeout.model_defs.source import ModelSource
from tapeout.model_defs.tokenizer import NO_TOKENIZER, TokenizerParts, tokenizer_parts
from tapeout.model_defs.tokenizer_files import TOKENIZER_FILES
from tapeout.model_defs.tying import resolve_tying
from tapeout.plugins.errors import UnsupportedError, UsageError
from tapeout.plugins.sample.params import shown


def open_hf_directory(folder: Path, *, trust_remote_code: bool) -> ModelSource:
    """Open a directory with config.json, safetensors and (optionally) tokenizer files.

    Errors: UsageError for missing or damaged files, UnsupportedError for models, weight formats
    and tokenizers that cannot be built. The order is cheap checks first.
    """
    raw_config = _read_json(folder / "config.json", required=True)
    check_raw_config(raw_config, folder / "config.json")
    config = _load_config(folder, raw_config, trust_remote_code)
    check_supported(config, folder, trust_remote_code=trust_remote_code)
    generation = _read_json(folder / "generation_config.json", required=False)
    check_generation(generation, folder / "generation_config.json")
    check_generation_use(generation, str(folder / "generation_config.json"))
    checkpoint = open_checkpoint(folder).with_model_prefix(base_model_prefix(config))
    config, checkpoint = resolve_tying(config, checkpoint)
    parts = _load_tokenizer(folder, trust_remote_code)

    def token_id(name: str) -> Any:
        """HF's precedence; a default of the config class counts least."""
        own = getattr(parts, name)
        candidates = (generation.get(name), raw_config.get(name), own, getattr(config, name, None))
        return next((value for value in candidates if value is not None), None)

    eos = token_id("eos_token_id")
    return ModelSource(
        origin="hf",
        config=config,
        checkpoint=checkpoint,
        tokenizer_json=parts.json_text,
        tokenizer_vocab_size=parts.vocab_size,
        chat_template=parts.chat_template,
        special_tokens=parts.special_tokens,
        generation={
            k: v for k, v in generation.items() if k != "transformers_version" and not k.startswith("_")
        },
        eos_token_ids=tuple(_ids(folder, "eos_token_id", eos)),
        bos_token_id=_one_id(folder, "bos_token_id", token_id("bos_token_id")),
        pad_token_id=_one_id(folder, "pad_token_id", token_id("pad_token_id")),
        trust_remote_code=trust_remote_code,
        hf_path=str(folder),
        files=_model_files(folder, checkpoint),
        raw_config=raw_config,
    )


def _model_files(folder: Path, checkpoint: SafetensorsCheckpoint) -> tuple[Path, ...]:
    """Files of this model, and those that would change it if they appeared."""
    there = [path for pattern in (*FILES, "*.py") for path in folder.glob(pattern)]
    names = (SINGLE, INDEX, "config.json", "generation_config.json", *TOKENIZER_FILES)
    shards = [tensor.path for tensor in checkpoint.files.values()]
    return tuple(dict.fromkeys([*there, *(folder / name for name in names), *shards]))


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if not required:
            return {}
        names = sorted(p.name for p in path.parent.iterdir())
        found = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        raise UsageError(
            f"{path.parent} has no {path.name}; it holds {found or 'nothing'}",
            hint="give a Hugging Face model directory, a hub id (org/name) or a .gguf file",
        )
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise UsageError(f"{path} is not valid JSON: {error}", hint="download the file again") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} is a JSON {type(data).__name__}, expected an object")
    return data


def _load_config(folder: Path, raw: Mapping[str, Any], trust_remote_code: bool) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        if "AutoConfig" in (raw.get("auto_map") or {}):
            require_remote_code(folder, str(model_type), trust_remote_code)
        else:
            architectures = ", ".join(raw.get("architectures") or []) or "none named"
            raise UnsupportedError(
                f"{folder / 'config.json'}: unknown model_type {model_type!r} "
                f"(architectures: {architectures}); "
                "this version of transformers has no config class and no model code for it",
                hint="a newer transformers may know it; check model_type for a typing error",
            )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # configs are validated by many different libraries' exceptions
        raise UsageError(f"{folder / 'config.json'} is not accepted by transformers: {error}") from error


def _load_tokenizer(folder: Path, trust_remote_code: bool) -> TokenizerParts:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return NO_TOKENIZER
    from transformers import AutoTokenizer

    raw = _read_json(folder / "tokenizer_config.json", required=False)
    if "AutoTokenizer" in (raw.get("auto_map") or {}) and not (folder / "tokenizer.json").is_file():
        require_remote_code(folder, f"the tokenizer {raw.get('tokenizer_class')}", trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # tokenizers raise plain Exception, ValueError, KeyError, ImportError, ...
        found = ", ".join(name for name in TOKENIZER_FILES if (folder / name).is_file())
        raise UsageError(
            f"the tokenizer in {folder} cannot be loaded from {found}: {error}",
            hint="download the tokenizer files again, or remove them all for an engine without a tokenizer",
        ) from error
    return tokenizer_parts(tokenizer)


def _ids(folder: Path, name: str, value: Any) -> list[int]:
    ids = token_ids(value)
    if ids is None:
        raise UsageError(f"{folder}: {name} is {shown(value)}, expected a token id or a list of them")
    return ids


def _one_id(folder: Path, name: str, value: Any) -> int | None:
    ids = _ids(folder, name, value)
    return ids[0] if ids else None
