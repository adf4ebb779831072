"""YAML files of the user's: read whole, with the line of everything, so that errors say where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.plugins.errors import UsageError

if TYPE_CHECKING:
    import yaml


@dataclass(frozen=True)
class Entry:
    """A key of a mapping, its line, and what stands behind it as a `Node`."""

    key: str
    line: int
    value: Node


@dataclass(frozen=True)
class Node:
    """A piece of a YAML file.

    Attributes:
        kind: `mapping`, `list` or `value`.
        line: where it begins.
        value: plain data: the whole of it.
        entries: of a mapping, in the file's order, keys given twice included.
        items: of a list.
    """

    kind: str
    line: int
    value: Any
    entries: tuple[Entry, ...] = ()
    items: tuple[Node, ...] = ()

    @property
    def type_name(self) -> str:
        return type(self.value).__name__


def read_yaml(path: Path, option: str) -> Node | None:
    """The document in `path`; None for an empty file. `option` names the file in errors.

    Raises UsageError: no pyyaml, a file that cannot be read, or no valid YAML.
    """
    try:
        import yaml
    except ImportError:
        raise UsageError(f"{option} needs the package pyyaml", hint="pip install 'tapeout[build]'") from None
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            return None if node is None else _convert(node, loader.construct_document)
        finally:
            loader.dispose()
    except OSError as error:
        raise UsageError(f"{option}: cannot read {str(path)!r}: {error.strerror}") from error
    # Dates and numbers that are none are ValueErrors (as is wrong UTF-8) or worse, deep nesting is a
    # RecursionError, and keys that cannot be hashed are TypeErrors: yaml wraps only what its grammar sees.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UsageError(f"{option}: {str(path)!r} is not valid YAML: {error}") from error


def _convert(node: yaml.Node, construct: Callable[[yaml.Node], Any]) -> Node:
    import yaml

    line = node.start_mark.line + 1
    # Constructing a mapping writes what `<<` merges into its node: what the user wrote is taken before.
    if isinstance(node, yaml.MappingNode):
        entries = tuple(
            Entry(str(key.value), key.start_mark.line + 1, _convert(below, construct))
            for key, below in node.value
        )
        return Node("mapping", line, construct(node), entries=entries)
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_convert(item, construct) for item in node.value)
        return Node("list", line, construct(node), items=items)
    return Node("value", line, construct(node))
