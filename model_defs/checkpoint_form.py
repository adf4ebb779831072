"""How a checkpoint's files become tensors by HF name, as plain data.

Opening a model takes transformers: its classes tell prefixes, tied tensors and head counts. What they
told is written down here, so that the same files can be opened again where there is no transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tapeout.model_defs.check_checkpoint import is_known_unused
from tapeout.model_defs.hf_checkpoint import SafetensorsCheckpoint, open_checkpoint
from tapeout.model_defs.source import Checkpoint, TensorInfo
from tapeout.model_defs.tying import tie, tied_names
from tapeout.plugins.errors import UsageError

if TYPE_CHECKING:
    from tapeout.model_defs.source import ModelSource


@dataclass(frozen=True)
class HfForm:
    """Safetensors of a Hugging Face directory.

    Attributes:
        prefix: HF's name of the model below the head, for checkpoints saved without it.
        tied: tensors that may be copies of others, copy to original.
    """

    prefix: str
    tied: Mapping[str, str]


@dataclass(frozen=True)
class GgufForm:
    """A GGUF file of one architecture; the head counts undo what llama.cpp's converter did."""

    architecture: str
    num_attention_heads: int
    num_key_value_heads: int


def form_of(source: ModelSource) -> HfForm | GgufForm:
    """The form of an open model's checkpoint."""
    from tapeout.model_defs.architecture import base_model_prefix

    if isinstance(source.checkpoint, SafetensorsCheckpoint):
        return HfForm(base_model_prefix(source.config), tied_names(source.config))
    from tapeout.model_defs.gguf_checkpoint import GgufCheckpoint

    assert isinstance(source.checkpoint, GgufCheckpoint), type(source.checkpoint).__name__
    heads = source.checkpoint.heads
    return GgufForm(source.checkpoint.file.architecture, heads.num_attention_heads, heads.num_key_value_heads)


def open_form(
    path: Path, form: HfForm | GgufForm, wanted: Mapping[str, TensorInfo], unused: Collection[str]
) -> tuple[Checkpoint, list[str]]:
    """Open `path` as a checkpoint of `form`, without torch and transformers.

    Args:
        path: a directory with safetensors, or a GGUF file.
        wanted: by HF name, what the file must hold (`Checkpoint.stored`).
        unused: HF names that it may hold beside them.

    Returns:
        The checkpoint, and one line for each of its tensors that is missing, extra or otherwise not as
        wanted.

    Raises:
        UsageError: files that are missing or damaged, or of the other kind.
    """
    if isinstance(form, HfForm):
        if not path.is_dir():
            raise _other_kind(path, "the safetensors of a Hugging Face model", "a GGUF file")
        checkpoint, _ = tie(open_checkpoint(path).with_model_prefix(form.prefix), form.tied)
        extra = checkpoint.files.keys() - wanted.keys() - set(unused)
        return checkpoint, _differences(checkpoint.stored, wanted) + _extras(
            checkpoint.files[name].info for name in extra if not is_known_unused(name)
        )
    if path.is_dir():
        raise _other_kind(path, f"a GGUF file ({form.architecture})", "a directory")
    return _open_gguf(path, form, wanted)


def _open_gguf(path: Path, form: GgufForm, wanted: Mapping[str, TensorInfo]) -> tuple[Checkpoint, list[str]]:
    from tapeout.model_defs.gguf_checkpoint import GgufCheckpoint
    from tapeout.model_defs.gguf_families import CONFIG_TENSORS, family_of
    from tapeout.model_defs.gguf_file import read_gguf
    from tapeout.model_defs.gguf_tensors import HeadCounts

    file = read_gguf(path)
    if file.architecture != form.architecture:
        raise UsageError(
            f"{path} has GGUF architecture {file.architecture!r}, "
            f"the engine was built from {form.architecture!r}",
            hint="give the GGUF file that the engine was built from",
        )
    names = {name: info.name for name, info in wanted.items() if info.name in file.tensors}
    heads = HeadCounts(form.num_attention_heads, form.num_key_value_heads)
    checkpoint = GgufCheckpoint(file, names, family_of(file), heads)
    known = {info.name for info in wanted.values()} | CONFIG_TENSORS.keys()
    extra = (
        TensorInfo(name, tensor.type.name, tensor.shape)
        for name, tensor in file.tensors.items()
        if name not in known
    )
    return checkpoint, _differences(checkpoint.stored, wanted) + _extras(extra)


def _differences(found: Mapping[str, TensorInfo], wanted: Mapping[str, TensorInfo]) -> list[str]:
    """A line for every wanted tensor that is missing or of another shape or type."""
    lines = []
    for name, info in sorted(wanted.items()):
        have = found.get(name)
        if have is None:
            lines.append(f"missing: {info.name} {info.dtype}{list(info.shape)}")
        elif (have.dtype, have.shape) != (info.dtype, info.shape):
            lines.append(
                f"differs: {info.name} is {have.dtype}{list(have.shape)}, "
                f"expected {info.dtype}{list(info.shape)}"
            )
    return lines


def _extras(infos: Iterable[TensorInfo]) -> list[str]:
    return sorted(f"extra: {info.name} {info.dtype}{list(info.shape)}" for info in infos)


def _other_kind(path: Path, expected: str, got: str) -> UsageError:
    return UsageError(
        f"the engine was built from {expected}, {path} is {got}",
        hint="give the checkpoint that the engine was built from",
    )
