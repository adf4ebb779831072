"""A generated table in a document, between two lines that mark its place."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class MarkedTable:
    begin: str
    end: str

    def place(self, text: str, table: str) -> str:
        """The document with the table between its marks; ValueError when it has none."""
        marked = re.compile(re.escape(self.begin) + r"\n.*?" + re.escape(self.end), re.S)
        if not marked.search(text):
            raise ValueError(f"no line {self.begin!r} followed by {self.end!r}")
        return marked.sub(lambda _: f"{self.begin}\n{table}\n{self.end}", text)
