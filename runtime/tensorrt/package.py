"""The Python packages of TensorRT: their names, whether they are installed, and loading one.

Nothing is imported until `load` is asked for a package: an engine without segments never touches them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from tapeout.plugins.errors import EngineIncompatibleError

#: Names of packages, as engines record them and as they are imported.
FULL, RTX = "tensorrt", "tensorrt_rtx"


@dataclass(frozen=True)
class PackageKind:
    """One of the packages.

    Attributes:
        name: import name. title: for people.
        bindings: import name of its bindings alone, which do where only they are installed.
        distributions: under which it may be installed, those that carry the bindings first.
        install: a command that installs it.
    """

    name: str
    title: str
    bindings: str
    distributions: tuple[str, ...]
    install: str


KINDS = {
    RTX: PackageKind(
        RTX,
        "TensorRT-RTX",
        "tensorrt_rtx_bindings",
        ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings", "tensorrt-rtx"),
        "pip install 'tapeout[tensorrt-rtx]'",
    ),
    FULL: PackageKind(
        FULL,
        "TensorRT",
        "tensorrt_bindings",
        ("tensorrt-cu13-bindings", "tensorrt-cu12-bindings", "tensorrt"),
        "pip install 'tapeout[tensorrt]', with NVIDIA's package index where yours has no wheels of it",
    ),
}


@dataclass(frozen=True)
class Package:
    """A loaded package: `module` has the API of its `version`."""

    kind: PackageKind
    version: str
    module: Any

    @property
    def title(self) -> str:
        """For people: "TensorRT-RTX 1.7.1.116"."""
        return f"{self.kind.title} {self.version}"


def installed_version(name: str) -> str | None:
    """Version of an installed package; None where there is none.

    Imported only where no distribution tells, as after an installation from an archive.
    """
    kind = KINDS[name]
    if not any(_can_import(module) for module in (kind.name, kind.bindings)):
        return None
    for distribution in kind.distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return load(name).version


def load(name: str) -> Package:
    """Import a package.

    Raises EngineIncompatibleError where it is not installed, or where its libraries do not load.
    """
    kind = KINDS[name]
    for module_name in (kind.name, kind.bindings):
        if not _can_import(module_name):
            continue
        try:
            module = importlib.import_module(module_name)
        except (ImportError, OSError) as error:
            raise EngineIncompatibleError(
                f"{kind.title} is installed and does not load: {error}",
                hint=f"install it again: {kind.install}",
            ) from None
        # Tools that drive TensorRT import it by its main name.
        sys.modules.setdefault(kind.name, module)
        return Package(kind, str(module.__version__), module)
    raise EngineIncompatibleError(f"{kind.title} is not installed", hint=kind.install)


def _can_import(module: str) -> bool:
    """Is there such a module? Nothing is imported. A folder of that name on the path is none."""
    if module in sys.modules:
        return sys.modules[module] is not None
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
