"""Quantities as people read them."""

from __future__ import annotations

from collections.abc import Sequence

#: Columns of tables and of text that is wrapped.
WIDTH = 100


def human_bytes(count: int) -> str:
    """`1.5 GiB`; bytes below 1 KiB as they are."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> str:
    """Rows with aligned columns; the last column is not padded."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(indent + "  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def counted(count: int, word: str, ending: str = "s") -> str:
    """The word with its number: "1 row", "2 matches"."""
    return f"{count} {word}{'' if count == 1 else ending}"
