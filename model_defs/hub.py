"""Hub ids: the local cache first, then a download."""

from __future__ import annotations

import re
from pathlib import Path

from tapeout.plugins.errors import UsageError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Weights as safetensors only: other formats are not read, and original/ folders repeat them.
FILES = (
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model",
    "tekken.json", "*.tiktoken", "tiktoken.model", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


def fetch_snapshot(model: str, *, revision: str | None, cache_dir: str | None, with_code: bool) -> Path:
    """The directory of a hub model's snapshot; HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are respected.

    The cache is used when it has the config and all weights, so that a cached model needs no
    network; `with_code` also fetches Python files.

    Errors: UsageError naming the id and what to do without network.
    """
    from huggingface_hub import snapshot_download

    patterns = [*FILES, "*.py"] if with_code else list(FILES)
    try:
        cached = Path(
            snapshot_download(
                model, revision=revision, cache_dir=cache_dir, allow_patterns=patterns, local_files_only=True
            )
        )
        if _is_complete(cached):
            return cached
        reason = f"the cached copy at {cached} is incomplete"
    except Exception:  # LocalEntryNotFoundError and relatives; its text advises about Python arguments
        reason = "it is not in the local cache"
    try:
        fetched = Path(
            snapshot_download(
                model, revision=revision, cache_dir=cache_dir, allow_patterns=patterns, etag_timeout=5
            )
        )
    except Exception as error:  # httpx, OS and hub errors alike: the user needs one message
        at = f" at revision {revision!r}" if revision else ""
        raise UsageError(
            f"model {model!r}{at} is not a local path and cannot be fetched from the hub: "
            f"{reason}; {type(error).__name__}: {_first_line(error)}",
            hint="check the id and the network (HF_TOKEN for gated models), or download the model elsewhere "
            "and give its directory; with HF_HUB_OFFLINE=1 it must already be in the cache under HF_HOME",
        ) from error
    if not _is_complete(fetched):  # offline, huggingface_hub hands out whatever the cache has
        raise UsageError(
            f"model {model!r}: {fetched} has no config.json with complete safetensors weights",
            hint="without HF_HUB_OFFLINE a partial download is completed; "
            "a model with pickle weights only must be converted to safetensors first",
        )
    return fetched


def _is_complete(folder: Path) -> bool:
    """Whether config and weights are there; a partial snapshot is fetched again."""
    from tapeout.model_defs.hf_checkpoint import INDEX, SINGLE, open_checkpoint

    if not (folder / "config.json").is_file() or not (
        (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    ):
        return False
    try:
        open_checkpoint(folder)
    except UsageError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
