"""What the user's MODEL argument names: a directory, a `.gguf` file or a hub id."""

from __future__ import annotations

from pathlib import Path

from tapeout.model_defs.hub import HUB_ID, fetch_snapshot
from tapeout.model_defs.source import ModelSource
from tapeout.plugins.errors import UsageError


def open_model(
    model: str, *, trust_remote_code: bool = False, revision: str | None = None, cache_dir: str | None = None
) -> ModelSource:
    """Open `model`: config, weights by name, tokenizer, chat template and generation defaults.

    Args:
        model: HF directory, `.gguf` file, or hub id `org/name` (a path wins over an id).
        trust_remote_code: whether Python code from the model's folder may run.
        revision: branch, tag or commit of a hub id; refused for a path, which has none.
        cache_dir: hub cache; the default follows HF_HOME.

    Errors: UsageError for what is missing or damaged, UnsupportedError for what cannot be built.
    """
    path = locate_model(model, revision=revision, cache_dir=cache_dir, with_code=trust_remote_code)
    if path.is_file():
        from tapeout.model_defs.gguf_model import open_gguf

        return open_gguf(path)
    from tapeout.model_defs.hf_directory import open_hf_directory

    return open_hf_directory(path, trust_remote_code=trust_remote_code)


def locate_model(
    model: str, *, revision: str | None = None, cache_dir: str | None = None, with_code: bool = False
) -> Path:
    """Where `model` lies: a directory or a GGUF file; a hub id is fetched unless the cache has it.

    Needs neither torch nor transformers. Arguments are those of `open_model`; `with_code` fetches
    Python files too.

    Errors: UsageError when it is neither a path nor a hub id that can be had.
    """
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, no right to look there, no such home
        shown = model if len(model) <= 200 else f"{model[:100]}... ({len(model)} characters)"
        raise UsageError(
            f"model {shown!r} cannot be opened: {getattr(error, 'strerror', None) or error}"
        ) from None
    if revision is not None and path.exists():
        raise UsageError(
            f"revision {revision!r} was given, but model {model!r} is a path and has no revisions",
            hint="leave out --revision, or give the model's hub id (org/name)",
        )
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf" and _magic(path) != b"GGUF":
            raise UsageError(
                f"{model} is a file but not a GGUF file",
                hint="give the directory that holds config.json, or a .gguf file",
            )
        return path
    if not HUB_ID.fullmatch(model) or model.endswith((".gguf", ".safetensors")):
        raise UsageError(
            f"model {model!r}: no such file or directory",
            hint="give a Hugging Face model directory, a hub id (org/name) or a .gguf file",
        )
    return fetch_snapshot(model, revision=revision, cache_dir=cache_dir, with_code=with_code)


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)
