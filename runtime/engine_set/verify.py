"""Every file of a set, read whole and compared with the index."""

from __future__ import annotations

from tapeout.plugins.errors import EngineCorruptError, TapeoutError
from tapeout.runtime.engine.reader import open_engine
from tapeout.runtime.engine_set.directory import EngineSet
from tapeout.runtime.engine_set.entries import file_sha256


def verify_set(engines: EngineSet) -> None:
    """Raise EngineCorruptError with every file that is missing or differs.

    Without an index the engines' own checksums are compared, which need no other list.
    """
    problems = []
    if engines.index is not None:
        for name, (size_bytes, sha256) in engines.index.files().items():
            path = engines.directory / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif (size := path.stat().st_size) != size_bytes:
                problems.append(f"{name} has {size:,} bytes, the index says {size_bytes:,}")
            elif (found := file_sha256(path)) != sha256:
                problems.append(f"{name} has SHA-256 {found}, the index says {sha256}")
    else:
        for entry in engines.engines:
            try:
                with open_engine(engines.directory / entry.file, verify=False) as engine:
                    engine.verify_all()
            except TapeoutError as error:
                problems.append(error.message)
    if problems:
        raise EngineCorruptError(
            f"{engines.directory} is damaged:\n" + "\n".join(f"  {problem}" for problem in problems),
            hint="fetch these files again with `tapeout pull`, or build them again",
        )
