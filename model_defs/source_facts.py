"""What a checkpoint says beside its weights, as an engine keeps it: enough to tell, without transformers,
whether another checkpoint would have made the same graph and speaks the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.model_defs.config_use import GENERATION_USED, is_cosmetic
from tapeout.model_defs.tokenizer_files import TOKENIZER_FILES
from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import shown

if TYPE_CHECKING:
    from tapeout.model_defs.gguf_file import GgufFile
    from tapeout.model_defs.source import Checkpoint, ModelSource

#: Keys of tokenizer_config.json that decide about ids; the others say where it came from.
_TOKENIZER_KEYS = ("bos_token", "eos_token", "unk_token", "add_bos_token", "add_eos_token")
_MISSING = object()


@dataclass(frozen=True)
class SourceFacts:
    """Facts of a checkpoint.

    Attributes:
        config: what decides the graph, by key: config.json without what has no effect, or a GGUF file's
            metadata of its architecture.
        resolved: what transformers made of that config.json, key by key; empty for GGUF, and wherever
            transformers was not asked.
        defaults: the value that a key has which config.json lacks; likewise.
        text: what decides about text, by name: values where they are short, else digests.
    """

    config: Mapping[str, Any]
    resolved: Mapping[str, Any]
    defaults: Mapping[str, Any]
    text: Mapping[str, Any]


def facts_of(source: ModelSource) -> SourceFacts:
    """The facts of an open model, with what transformers made of them."""
    from tapeout.model_defs.config_use import class_defaults

    found = read_facts(Path(source.hf_path), source.checkpoint)
    if not source.raw_config:
        return found
    resolved = _plain(source.config.to_dict())
    defaults = _plain(class_defaults(source.config.__class__))
    return SourceFacts(found.config, _deciding(resolved), _deciding(defaults), found.text)


def read_facts(path: Path, checkpoint: Checkpoint | None = None) -> SourceFacts:
    """The facts of the checkpoint at `path`, a directory or a GGUF file; needs no transformers.

    Args:
        checkpoint: the same, open already: a GGUF file takes a second to parse.

    Raises UsageError: files are missing or damaged.
    """
    if path.is_dir():
        raw = _read_json(path / "config.json", required=True)
        return SourceFacts(_deciding(raw), {}, {}, _hf_text(path, raw))
    from tapeout.model_defs.gguf_checkpoint import GgufCheckpoint
    from tapeout.model_defs.gguf_file import read_gguf

    return _gguf_facts(checkpoint.file if isinstance(checkpoint, GgufCheckpoint) else read_gguf(path))


def differing_config(built: SourceFacts, found: SourceFacts) -> list[str]:
    """A line for each key whose value makes another graph. `built` is an engine's, `found` a checkpoint's."""
    ours, theirs = built.config, found.config
    lines = []
    for key in sorted(ours.keys() | theirs.keys()):
        was, now = ours.get(key, _MISSING), theirs.get(key, _MISSING)
        if was is _MISSING:  # said now, and a default or derived before
            same = now == built.resolved.get(key, _MISSING)
        elif now is _MISSING:  # said before, and left to the default now
            same = was == built.defaults.get(key, _MISSING)
        else:
            same = now in (was, built.resolved.get(key, _MISSING))
        if not same:
            before = "without it" if was is _MISSING else f"with {shown(was)}"
            lines.append(f"{key} is {_shown(now)}, the engine was built {before}")
    return lines


def differing_text(built: SourceFacts, found: SourceFacts) -> list[str]:
    """A line for each fact about text that differs."""
    ours, theirs = built.text, found.text
    lines = []
    for key in sorted(ours.keys() | theirs.keys()):
        was, now = ours.get(key, _MISSING), theirs.get(key, _MISSING)
        if was == now:
            continue
        if any(isinstance(v, str) and v.startswith("sha256:") for v in (was, now)):
            lines.append(f"{key} is another one" if _MISSING not in (was, now) else f"{key}: {_there(was)}")
        else:
            before = "none" if was is _MISSING else shown(was)
            lines.append(f"{key} is {_shown(now)}, the engine has {before}")
    return lines


def _deciding(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that a graph may depend on; rope in one spelling, null as if it were not there."""
    kept = {k: v for k, v in raw.items() if v is not None and not is_cosmetic(k)}
    old = [kept.pop(name, None) for name in ("rope_parameters", "rope_scaling")]
    beside: dict[str, Any] = {
        name: kept.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in kept
    }
    rope: Any = next((value for value in old if value), {})
    if rope or beside:
        kept["rope_parameters"] = _rope(rope, beside)
    return kept


def _rope(rope: Any, beside: Mapping[str, Any]) -> Any:
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return rope  # by layer type: only transformers 5 writes that
    merged = {**beside, **rope}
    merged["rope_type"] = merged.get("rope_type", merged.pop("type", "default"))
    merged.pop("type", None)
    return {k: v for k, v in merged.items() if v is not None}


def _hf_text(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    generation = _read_json(folder / "generation_config.json", required=False)
    tokenizer = _read_json(folder / "tokenizer_config.json", required=False)
    facts: dict[str, Any] = {
        f"generation {key}": value
        for key, value in generation.items()
        if key in GENERATION_USED and not key.endswith("_token_id") and value is not None
    }
    for key in ("eos_token_id", "bos_token_id"):
        value = generation.get(key) if generation.get(key) is not None else config.get(key)
        if value is not None:
            facts[key] = value if isinstance(value, list) else [value]
    for key in _TOKENIZER_KEYS:
        value = tokenizer.get(key)
        if value is not None:
            facts[f"tokenizer {key}"] = value.get("content") if isinstance(value, Mapping) else value
    if (folder / "tokenizer.json").is_file():
        data = _read_json(folder / "tokenizer.json", required=True)
        for setting in ("padding", "truncation"):  # of the last call, not of the vocabulary
            data.pop(setting, None)
        facts["tokenizer.json"] = _digest(data)
    else:
        for name in TOKENIZER_FILES:
            if name != "tokenizer_config.json" and (folder / name).is_file():
                facts[name] = "sha256:" + hashlib.sha256((folder / name).read_bytes()).hexdigest()
    template: Any = tokenizer.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, str):
        facts["chat template"] = _digest(template)
    return facts


def _gguf_facts(file: GgufFile) -> SourceFacts:
    from tapeout.model_defs.gguf_families import CONFIG_TENSORS
    from tapeout.model_defs.tensor_hashes import TensorHashes

    config = {k: v for k, v in file.metadata.items() if k.startswith(f"{file.architecture}.")}
    config["general.architecture"] = file.architecture
    # Some tensors are no weights: frequencies that the model's config holds elsewhere.
    stated = ((t.name, file.path, t.start, t.nbytes) for n, t in file.tensors.items() if n in CONFIG_TENSORS)
    config |= {name: f"sha256:{digest}" for name, digest in TensorHashes(stated).result().items()}
    text = {
        key: value if isinstance(value, int | bool) else _digest(value)
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.") and key != "tokenizer.ggml.padding_token_id"
    }
    return SourceFacts(_plain(config), {}, {}, _plain(text))


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not required:
            return {}
        raise UsageError(
            f"{path.parent} has no {path.name}", hint="give a Hugging Face model directory or a .gguf file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}", hint="download the file again") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} is a JSON {type(data).__name__}, expected an object")
    return data


def _digest(value: Any) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """As it comes back from JSON: keys are text, tuples lists, what JSON lacks text."""
    return json.loads(json.dumps(value, default=str))


def _shown(value: Any) -> str:
    return "not there" if value is _MISSING else shown(value)


def _there(was: Any) -> str:
    return "the engine has none" if was is _MISSING else "not there, the engine has one"
