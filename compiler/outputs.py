"""What a build will write, checked before anything is done: writable, and no file twice or an input."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tapeout.compiler.files import check_directory, check_output
from tapeout.compiler.limits import target_kind
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.report import report_path
from tapeout.plugins.errors import UsageError


def check_outputs(output: Path, options: BuildOptions, inputs: Iterable[Path] = ()) -> None:
    """Refuse paths that cannot be written, that are one file twice, or that are one of `inputs`.

    A dry run writes neither engine nor report. A timing cache that knows everything is not written,
    so it may lie where nothing can be.

    Raises UsageError.
    """
    if options.dump is not None:
        check_directory(options.dump, "dump")
    if options.keep_onnx is not None:
        if target_kind(options) != "cuda":
            raise UsageError(
                f"keep_onnx: regions are those of cuda targets, got target {options.target!r}",
                hint="tapeout inspect ENGINE --onnx FILE writes the whole graph of any engine",
            )
        check_directory(options.keep_onnx, "keep_onnx")
    if not options.dry_run:
        check_output(output)
        check_output(report_path(output), "report")
    check_apart(output, options, inputs)


def check_apart(output: Path | None, options: BuildOptions, inputs: Iterable[Path]) -> None:
    """Refuse a build that would write one file twice or overwrite one of `inputs`. Raises UsageError.

    `output` is None where a pack is written and no engine.
    """
    written = {} if output is None else {"output": output, "report": report_path(output)}
    if options.pack is not None:
        written["pack"] = options.pack
    if options.timing_cache is not None:
        written["timing cache"] = options.timing_cache
    if options.dump is not None:
        written["dump"] = options.dump
    if options.keep_onnx is not None:
        written["keep_onnx"] = options.keep_onnx
    taken: dict[tuple[object, ...], str] = {}
    for path in inputs:
        taken.setdefault(_identity(path), f"an input of the build ({path})")
    problems = []
    for what, path in written.items():
        other = taken.setdefault(_identity(path), f"the {what}")
        if other != f"the {what}":
            problems.append(f"{what} {path} is also {other}, which would be lost")
    if problems:
        raise UsageError("\n".join(problems), hint="give each output a name of its own, outside the model")


def _identity(path: Path) -> tuple[object, ...]:
    """Equal for two names of one file, through links of both kinds, whether it exists or not."""
    real = os.path.realpath(path)
    try:
        found = Path(real).stat()
    except OSError:  # not there yet
        return (real,)
    return (found.st_dev, found.st_ino)
