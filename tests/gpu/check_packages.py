"""Are the packages here that tests/gpu needs? Lists those that are missing, and exits with 2."""

from __future__ import annotations

import importlib.util
import sys

#: Module to package: the runtime, `tapeout weights` of a GGUF file, and pytest.
NEEDED = {
    "click": "click>=8.2",
    "cuda.bindings": "cuda-bindings>=13.0",
    "gguf": "gguf>=0.17",
    "jinja2": "jinja2>=3.1.6",
    "ml_dtypes": "ml_dtypes>=0.5",
    "numpy": "numpy>=2.0",
    "pytest": "pytest>=8.4",
    "tokenizers": "tokenizers>=0.21",
    "xxhash": "xxhash>=3.4",
}


def there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package of a submodule
        return False


if __name__ == "__main__":
    missing = [package for module, package in NEEDED.items() if not there(module)]
    if missing:
        print(f"error: {sys.executable} has no {', '.join(missing)}", file=sys.stderr)
        quoted = " ".join(f"'{package}'" for package in missing)
        print(f"hint: {sys.executable} -m pip install {quoted}", file=sys.stderr)
        sys.exit(2)
