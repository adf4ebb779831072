"""Sets of engines for tests of stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result

from tapeout.plugins.native.host import detect_host
from tapeout.runtime.engine_set import EngineSetIndex, describe_engine, save_index

LEVEL = detect_host().level
OTHER = "cpu:aarch64" if LEVEL != "aarch64" else "cpu:x86_64_v2"
Write = Callable[..., Path]


def refused(result: Result, code: int, *words: str) -> None:
    """The command ended with this code, a hint and these words."""
    assert result.exit_code == code, (result.stdout, result.stderr)
    assert "hint: " in result.stderr
    for word in words:
        assert word in result.stderr


def make_set(folder: Path, write: Write, *targets: str, **changes: Any) -> Path:
    """A set of engines that share one weight file."""
    folder.mkdir(exist_ok=True)
    engines, weights = [], []
    for target in targets or (f"cpu:{LEVEL}", OTHER):
        path = write(folder / f"{target.partition(':')[2]}.engine", shared=True, target=target, **changes)
        entry, shared = describe_engine(path)
        engines.append(entry)
        weights += shared
    save_index(EngineSetIndex.of("alphabet", "test:0", tuple(engines), tuple(weights), {}), folder)
    return folder
