"""Build options from a YAML file, merged with flags: flag over file over default."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.compiler.options import DTYPE_ALIASES, FIELDS, BuildOptions, problem
from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import shown, surrogate_problem


@dataclass(frozen=True)
class _Entry:
    key: str
    line: int
    value: Any


def load_options(config: Path | None, flags: Mapping[str, Any]) -> BuildOptions:
    """Merge a file's values with the flags the user gave.

    Args:
        config: a YAML mapping from option names (dashes or underscores) to values, or None.
            A relative path inside it is relative to the current directory, as in a flag.
        flags: field name to value, only for flags that were given.

    Raises:
        UsageError: the file cannot be read, or holds unknown keys, keys given twice or values
            of a wrong type; all are listed with their line.
    """
    if config is None:
        return BuildOptions(**flags)
    values, problems = _check(config, _entries(config))
    if problems:
        raise UsageError(
            "\n".join(problems), hint=f"a file takes these keys: {', '.join(map(_dashed, FIELDS))}"
        )
    return BuildOptions(**{**values, **flags})


def _check(config: Path, entries: list[_Entry]) -> tuple[dict[str, Any], list[str]]:
    """The values by field name, and everything that is wrong with the entries."""
    values: dict[str, Any] = {}
    problems = []
    for entry in entries:
        where = f"{config}:{entry.line}: {entry.key.encode(errors='backslashreplace').decode()}"
        name = entry.key.replace("-", "_")
        if name not in FIELDS:
            problems.append(f"{where}: unknown key{_nearest(name)}")
            continue
        if name in values:
            problems.append(f"{where}: given twice")
            continue
        if isinstance(entry.value, str) and (reason := surrogate_problem(entry.value)):
            problems.append(f"{where}: {shown(entry.value)} {reason}")
            continue
        values[name] = _convert(name, entry.value)
        if complaint := problem(name, values[name], where):
            problems.append(complaint)
    return values, problems


def _convert(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if FIELDS[name].metadata["kind"] is Path:
        try:
            return Path(value).expanduser()
        except RuntimeError:  # `~name` of nobody: a folder of that name
            return Path(value)
    return DTYPE_ALIASES.get(value, value) if name == "dtype" else value


def _nearest(name: str) -> str:
    # `no_verify` is a flag whose key is `verify`.
    found = difflib.get_close_matches(name.removeprefix("no_"), FIELDS, n=1, cutoff=0.5)
    return f", did you mean {_dashed(found[0])}?" if found else ""


def _key_text(key: Any) -> str:
    try:
        return str(key)
    except ValueError:  # an integer of more digits than Python prints; no option has such a name
        return ""


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _entries(config: Path) -> list[_Entry]:
    """Keys in the file's order with their lines; keys that YAML would merge silently included."""
    try:
        import yaml
    except ImportError:
        raise UsageError("--config needs the package pyyaml", hint="pip install 'tapeout[build]'") from None
    try:
        text = config.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config: cannot read {str(config)!r}: {error.strerror}") from error
    # Dates and numbers that are none are ValueErrors (as is wrong UTF-8) or worse, deep nesting is a
    # RecursionError, and keys that cannot be hashed are TypeErrors: yaml wraps only what its grammar sees.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UsageError(f"--config: {str(config)!r} is not valid YAML: {error}") from error
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(
            f"--config: {str(config)!r} holds a {type(data).__name__}, expected option names and values",
            hint="for example `max-batch-size: 16`",
        )
    keys = [(str(key.value), key.start_mark.line + 1) for key, _ in node.value]
    by_text = {_key_text(key): value for key, value in data.items()}
    return [_Entry(key, line, by_text.get(key)) for key, line in keys]
