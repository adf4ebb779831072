"""Weights of a Hugging Face directory: one safetensors file or an index with shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tapeout.model_defs.safetensors_file import FileTensor, parse_header
from tapeout.model_defs.source import Checkpoint, TensorInfo
from tapeout.model_defs.tensor_hashes import TensorHashes, unreadable
from tapeout.plugins.errors import UnsupportedError, UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """Implements `Checkpoint` over byte ranges of safetensors files, by HF module name."""

    files: Mapping[str, FileTensor]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: tensor.info for name, tensor in self.files.items()}

    def read(self, name: str) -> np.ndarray:
        tensor = self.files[name]
        try:
            array = tensor.read()
        except (OSError, EOFError) as error:
            raise unreadable(name, error) from error
        self.hashes.read(name, array.reshape(-1).view(np.uint8).data)
        return array

    @property
    def stored(self) -> Mapping[str, TensorInfo]:
        return self.tensors

    @cached_property
    def hashes(self) -> TensorHashes:
        parts = ((name, t.path, t.start, t.nbytes) for name, t in self.files.items())
        return TensorHashes(parts, see_reads=True)

    def digest(self) -> str:
        return digest_checkpoint(self)

    def with_model_prefix(self, name: str) -> SafetensorsCheckpoint:
        """The same tensors below `name.` unless some are there already.

        Checkpoints saved from a model without its head (GPT-2 among them) lack the prefix of HF's
        model class; "" is a class without one. A head stays where it is.
        """
        if not name or any(tensor.startswith(f"{name}.") for tensor in self.files):
            return self
        return self._with_prefix(f"{name}.", keep=lambda tensor: tensor.startswith("lm_head."))

    def _with_prefix(self, prefix: str, keep: Callable[[str], bool]) -> SafetensorsCheckpoint:
        renamed = {}
        for name, tensor in self.files.items():
            new = name if keep(name) else prefix + name
            renamed[new] = tensor.renamed(new)
        return SafetensorsCheckpoint(renamed)


def digest_checkpoint(checkpoint: Checkpoint) -> str:
    """SHA-256 over (name, type, shape, SHA-256 of the bytes) of every tensor in order of names.

    A digest per tensor makes the result independent of sharding.
    """
    total, stored = hashlib.sha256(), checkpoint.stored
    for name, value in sorted(checkpoint.hashes.result().items()):
        row = [name, stored[name].dtype, list(stored[name].shape), value]
        total.update(json.dumps(row).encode() + b"\n")
    return total.hexdigest()


def open_checkpoint(folder: Path) -> SafetensorsCheckpoint:
    """The weights in `folder`, with every header checked.

    Errors: UsageError listing all offenders (missing shards, truncated or inconsistent files,
    tensors the index promises but no shard has); UnsupportedError for other weight formats.
    """
    if (folder / SINGLE).is_file():  # HF's precedence: the single file wins over an index
        files, problems = parse_header(folder / SINGLE)
    elif (folder / INDEX).is_file():
        files, problems = _open_shards(folder)
    else:
        raise _no_weights(folder)
    if problems:
        raise UsageError(
            f"the weights in {folder} cannot be used:\n" + "\n".join(f"  {p}" for p in problems),
            hint="download the named files again; a partial download or a git-lfs pointer looks like this",
        )
    return SafetensorsCheckpoint(files)


def _open_shards(folder: Path) -> tuple[dict[str, FileTensor], list[str]]:
    weight_map, problems = _read_index(folder / INDEX)
    shards = sorted(set(weight_map.values()))
    in_shard: dict[str, dict[str, FileTensor]] = {}
    for shard in shards:
        if Path(shard).name != shard:
            problems.append(f"{INDEX}: shard {shard!r} is not a file name in the same folder")
        elif not (folder / shard).is_file():
            count = sum(1 for file in weight_map.values() if file == shard)
            problems.append(f"{shard}: missing ({count} tensors of {INDEX})")
        else:
            in_shard[shard], shard_problems = parse_header(folder / shard)
            problems += shard_problems
    if problems:
        return {}, problems
    files: dict[str, FileTensor] = {}
    for name, shard in weight_map.items():
        if name in in_shard[shard]:
            files[name] = in_shard[shard][name]
        else:
            problems.append(f"{shard}: tensor {name!r} is in {INDEX} but not in the file")
    for shard, tensors in in_shard.items():
        for name, tensor in tensors.items():
            if weight_map.get(name, shard) != shard:
                problems.append(
                    f"{shard}: tensor {name!r} is also in {weight_map[name]}, which {INDEX} names"
                )
            files.setdefault(name, tensor)  # HF loads what the shards hold, listed or not
    return files, problems


def _read_index(path: Path) -> tuple[dict[str, str], list[str]]:
    try:
        index = json.loads(path.read_bytes())
    except ValueError as error:
        return {}, [f"{path.name}: not valid JSON ({error})"]
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return {}, [f"{path.name}: no weight_map"]
    if bad := [name for name, shard in weight_map.items() if not isinstance(shard, str)]:
        return {}, [f"{path.name}: weight_map of {name!r} is not a file name" for name in bad]
    return weight_map, []


def _no_weights(folder: Path) -> UsageError | UnsupportedError:
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    torch_files = [
        n for n in names if n.startswith("pytorch_model") and n.endswith((".bin", ".bin.index.json"))
    ]
    if torch_files:
        return UnsupportedError(
            f"{folder} holds its weights as pickle files only ({', '.join(torch_files)}); "
            f"expected {SINGLE} or {INDEX}",
            hint="convert once: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) "
            "writes safetensors",
        )
    strays = [n for n in names if n.endswith((".safetensors", ".gguf", ".msgpack", ".h5"))]
    found = f"found {', '.join(strays)}" if strays else "found no weight files"
    return UsageError(
        f"{folder} has neither {SINGLE} nor {INDEX}: {found}",
        hint="shards need their index file; a .gguf file is given by its own path",
    )
