"""The package list, computed: a list kept by hand would silently miss a new folder.

Everything else stands in pyproject.toml.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
FOLDERS = ("cli", "compiler", "model_defs", "plugins", "runtime")


def packages() -> list[str]:
    """Every folder below FOLDERS under its import name, those with only data files too."""
    found = []
    for folder in FOLDERS:
        below = find_namespace_packages(str(ROOT / folder), exclude=["__pycache__", "*.__pycache__"])
        found += [f"tapeout.{folder}", *(f"tapeout.{folder}.{name}" for name in below)]
    return found


setup(packages=packages())
