"""From a model to an engine. See README.md; `build` is the whole of it."""

from tapeout.compiler.options import BuildOptions
from tapeout.compiler.report import BuildReport

__all__ = ["BuildOptions", "BuildReport"]
