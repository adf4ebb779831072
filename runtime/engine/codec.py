"""Frozen dataclasses to JSON data and back, strictly.

Reading checks every key and every type against the class's annotations, so that a program
or manifest is either exactly what this version writes or an EngineCorruptError that names
the place (`program.records[3].op`).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar, Union

from tapeout.plugins.errors import EngineCorruptError

D = TypeVar("D")


def encode(value: Any) -> Any:
    """Dataclasses become objects, tuples lists, mappings objects (in their order)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no place in an engine's metadata: {value!r}")


def decode(cls: type[D], data: Any, where: str) -> D:
    """Rebuild dataclass `cls`; `where` names it in errors. Raises EngineCorruptError."""
    kind: Any = cls
    if problem := _key_problem(kind, data, where):
        raise EngineCorruptError(problem)
    return cls(**{key: _value(hint, data[key], f"{where}.{key}") for key, hint in _hints(kind).items()})


def faults(cls: type[D], data: Any, where: str) -> list[str]:
    """Why `decode` would refuse: one line about the keys, and one for each bad field that is there."""
    kind: Any = cls
    problem = _key_problem(kind, data, where)
    found = [problem] if problem else []
    if isinstance(data, Mapping):
        for key, hint in _hints(kind).items():
            if key in data:
                try:
                    _value(hint, data[key], f"{where}.{key}")
                except EngineCorruptError as error:
                    found.append(error.message)
    return found


def _key_problem(cls: Any, data: Any, where: str) -> str | None:
    if not isinstance(data, Mapping):
        return _bad(where, f"an object for {cls.__name__}", data).message
    hints = _hints(cls)
    missing, unknown = hints.keys() - data.keys(), data.keys() - hints.keys()
    if not missing and not unknown:
        return None
    parts = [f"missing {sorted(missing)}"] * bool(missing) + [f"unknown {sorted(unknown)}"] * bool(unknown)
    return f"{where}: keys do not match {cls.__name__}: {', '.join(parts)}"


@lru_cache(maxsize=64)
def _hints(cls: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _value(hint: Any, data: Any, where: str) -> Any:
    if hint is Any:
        return data
    if hint in (str, int, float, bool, types.NoneType):
        if type(data) is not hint:  # bool is an int to isinstance, but not here
            raise _bad(where, "null" if hint is types.NoneType else hint.__name__, data)
        return data
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return decode(hint, data, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(args, data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise _bad(where, "a list", data)
        return tuple(_value(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if not isinstance(data, Mapping):
        raise _bad(where, "an object", data)
    return {k: _value(args[1], v, f"{where}.{k}") for k, v in data.items()}


def _union(members: tuple[Any, ...], data: Any, where: str) -> Any:
    """Members are scalars and dataclasses, which are told apart by their fields."""
    for member in members:
        if type(data) is member:
            return data
    compound: list[Any] = [m for m in members if dataclasses.is_dataclass(m)]
    if compound and isinstance(data, Mapping):
        known = (m for m in compound if _hints(m).keys() == data.keys())
        return _value(next(known, compound[0]), data, where)
    raise _bad(where, " or ".join(m.__name__ for m in members), data)


def _bad(where: str, expected: str, data: Any) -> EngineCorruptError:
    text = repr(data)
    return EngineCorruptError(
        f"{where}: expected {expected}, got {text if len(text) < 80 else text[:77] + '...'}"
    )
