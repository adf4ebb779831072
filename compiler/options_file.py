"""Build options from a YAML file, merged with flags: flag over file over default."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapeout.compiler.options import DTYPE_ALIASES, FIELDS, BuildOptions, problem
from tapeout.compiler.yaml_file import Entry, read_yaml
from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import shown, surrogate_problem


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


def _check(config: Path, entries: Sequence[Entry]) -> tuple[dict[str, Any], list[str]]:
    """The values by field name, and everything that is wrong with the entries."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for entry in entries:
        where = f"{config}:{entry.line}: {printable(entry.key)}"
        if not take_option(entry, where, values, problems):
            problems.append(f"{where}: unknown key{_nearest(entry.key.replace('-', '_'))}")
    return values, problems


def take_option(entry: Entry, where: str, values: dict[str, Any], problems: list[str]) -> bool:
    """Put the option an entry gives into `values`, or what is wrong with it into `problems`.

    False when there is no such option. `where` is how a message calls the entry.
    """
    name, value = entry.key.replace("-", "_"), entry.value.value
    if name not in FIELDS:
        return False
    if name in values:
        problems.append(f"{where}: given twice")
    elif isinstance(value, str) and (reason := surrogate_problem(value)):
        problems.append(f"{where}: {shown(value)} {reason}")
    else:
        values[name] = _convert(name, value)
        if complaint := problem(name, values[name], where):
            problems.append(complaint)
    return True


def printable(key: str) -> str:
    """A key as a message can hold it."""
    return key.encode(errors="backslashreplace").decode()


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


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _entries(config: Path) -> Sequence[Entry]:
    """Keys in the file's order with their lines; keys that YAML would merge silently included."""
    node = read_yaml(config, "--config")
    if node is None:
        return ()
    if node.kind != "mapping":
        raise UsageError(
            f"--config: {str(config)!r} holds a {node.type_name}, expected option names and values",
            hint="for example `max-batch-size: 16`",
        )
    return node.entries
