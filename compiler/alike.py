"""Whether two layers of a model differ in their weights and their index alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

# What `nn.Module` keeps for itself; hooks have to be absent, the rest is compared on its own.
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def alike(a: nn.Module, b: nn.Module, a_index: int, b_index: int) -> bool:
    """True if both are modules of one class, part by part, with parameters of the same shapes, the same
    buffers and attributes, and code that gives their index to nothing but the cache."""
    if type(a) is not type(b) or not _same_tensors(a, b):
        return False
    own_a, own_b = vars(a), vars(b)
    if own_a.keys() != own_b.keys():
        return False
    indices = set()
    for name in own_a.keys() - _TABLES:
        x, y = own_a[name], own_b[name]
        if type(x) is int and type(y) is int and (x, y) == (a_index, b_index):
            indices.add(name)
        elif not same(x, y, a, b):
            return False
    if indices and not _only_for_the_cache(a.__class__, frozenset(indices)):
        return False
    return a._modules.keys() == b._modules.keys() and all(
        x is y if x is None or y is None else alike(x, y, a_index, b_index)
        for x, y in zip(a._modules.values(), b._modules.values(), strict=True)
    )


def _same_tensors(a: nn.Module, b: nn.Module) -> bool:
    """Parameters of the same shapes, buffers of the same values; none of them shared."""
    for table_a, table_b in ((a._parameters, b._parameters), (a._buffers, b._buffers)):
        if table_a.keys() != table_b.keys():
            return False
        for name, x in table_a.items():
            y = table_b[name]
            if x is None and y is None:
                continue
            if x is None or y is None or x is y or x.shape != y.shape or x.dtype != y.dtype:
                return False
            if table_a is a._buffers and not x.is_meta and not torch.equal(x, y):
                return False
    return True


def same(x: Any, y: Any, a: nn.Module | None = None, b: nn.Module | None = None) -> bool:
    """One object, or plain values and containers that hold the same; methods of `a` are those of `b`."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if inspect.ismethod(x):
        return x.__func__ is y.__func__ and (
            (x.__self__ is a and y.__self__ is b) or x.__self__ is y.__self__
        )
    if isinstance(x, partial):
        return same((x.func, x.args, x.keywords), (y.func, y.args, y.keywords), a, b)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(same(p, q, a, b) for p, q in zip(x, y, strict=True))
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[k], y[k], a, b) for k in x)
    if isinstance(x, (set, frozenset)):
        return bool(x == y)
    return isinstance(x, _PLAIN) and bool(x == y)


@lru_cache(maxsize=256)
def _only_for_the_cache(module: type[nn.Module], names: frozenset[str]) -> bool:
    """Whether the code of a class gives these attributes of `self` to the cache and to nothing else."""
    for base in module.__mro__:
        if base in (nn.Module, object) or base.__module__ == "torch.nn.modules.module":
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            return False
        (definition,) = tree.body
        assert isinstance(definition, ast.ClassDef)
        for method in definition.body:
            if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "extra_repr"):
                continue
            if not all(_allowed(around) for around in _uses(method, names)):
                return False
    return True


def _uses(tree: ast.AST, names: frozenset[str]) -> list[ast.AST | None]:
    """What stands around each `self.<name>`: a call, a subscript, a comparison, an operation."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return [
        parents.get(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]


def _allowed(around: ast.AST | None) -> bool:
    if isinstance(around, ast.Compare):  # `self.layer_idx is None` is the same for all
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in around.ops)
    owner = around.func if isinstance(around, ast.Call) else getattr(around, "value", None)
    if not isinstance(around, (ast.Call, ast.Subscript)) or not isinstance(owner, ast.AST):
        return False
    text = ast.unparse(owner)
    return "cache" in text or "past" in text
