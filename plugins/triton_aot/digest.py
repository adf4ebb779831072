"""The digest of everything a cubin depends on: sources, constants, compiler, flags."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap
from functools import cache
from types import ModuleType
from typing import Any

from tapeout.plugins.cuda import KernelSpec
from tapeout.plugins.errors import UnsupportedError

#: Raised when the way kernels are compiled changes: flags, cubin layout, what is stored with it.
RECIPE_VERSION = 1


def triton_version() -> str:
    """The version of Triton; raises UnsupportedError when it is not installed."""
    try:
        import triton
    except ImportError as error:
        raise UnsupportedError(
            "Triton, which compiles the CUDA kernels, is not installed",
            hint="install the build extra: pip install 'tapeout[build]'",
        ) from error
    version: str = triton.__version__
    return version


def ptxas_version(sm: int) -> str:
    """Version of the assembler Triton brings for an SM, for example "13.4": that of its CUDA toolkit.

    A driver loads cubins of toolkits with its own major version or an older one.
    """
    triton_version()
    from triton.backends.nvidia.compiler import get_ptxas

    version: str = get_ptxas(sm).version
    return version


def kernel_function(spec: KernelSpec) -> Any:
    """The `@triton.jit` function a spec names; raises UnsupportedError when there is none."""
    triton_version()
    function = getattr(importlib.import_module(spec.module), spec.function, None)
    if function is None or not hasattr(function, "arg_names"):
        raise UnsupportedError(f"{spec.module} defines no Triton kernel {spec.function!r}")
    return function


def kernel_digest(spec: KernelSpec) -> str:
    """SHA-256 (hex) of a kernel's source, the helpers and globals it uses, its spec and the compiler.

    Positions in files, comments and docstrings do not enter: moving a kernel keeps its timings.
    """
    rest = (
        spec.signature,
        tuple(sorted(spec.constants.items())),
        spec.num_warps,
        spec.num_stages,
        tuple(sorted(spec.divisible_by_16)),
        spec.fp_fusion,
    )
    digest = _begun(triton_version(), spec.module, spec.function).copy()
    digest.update(repr(rest)[1:].encode())
    return str(digest.hexdigest())


@cache
def _begun(version: str, module: str, function: str) -> Any:
    """The hash of what all specs of a kernel share, and of the beginning of the tuple that holds it: a build
    asks for thousands of digests, and a kernel's source is long."""
    shared = (RECIPE_VERSION, version, _source_closure(module, function))
    return hashlib.sha256(f"{repr(shared)[:-1]}, ".encode())


@cache
def _source_closure(module: str, function: str) -> str:
    found: dict[str, str] = {}
    _collect(getattr(importlib.import_module(module), function), found)
    return repr(sorted(found.items()))


def _collect(function: Any, found: dict[str, str]) -> None:
    """Add the syntax tree of a jitted function and of all it reaches through its globals."""
    python = getattr(function, "fn", function)
    name = f"{python.__module__}.{python.__qualname__}"
    if name in found:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(python))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    found[name] = ast.dump(tree)
    for node in ast.walk(tree):
        value = _resolve(node, python.__globals__)
        if value is None or isinstance(value, ModuleType):
            continue
        owner = getattr(getattr(value, "fn", value), "__module__", "") or ""
        if hasattr(value, "arg_names") and not owner.startswith("triton."):
            _collect(value, found)
        elif isinstance(value, (int, float, str)) or type(value).__name__ == "constexpr":
            found[f"{name}:{ast.unparse(node)}"] = repr(getattr(value, "value", value))


def _resolve(node: ast.AST, names: dict[str, Any]) -> Any:
    """The global that a name or `module.name` refers to, or None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = names.get(node.value.id)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    return None
