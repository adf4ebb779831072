"""CPU tactics of select_rows."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic

TACTICS = (AtenTactic("select_rows", batch_invariant=True),)
