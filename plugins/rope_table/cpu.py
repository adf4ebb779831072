"""CPU tactics of rope_table."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic

TACTICS = (AtenTactic("rope_table"),)
