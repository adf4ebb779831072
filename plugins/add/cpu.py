"""CPU tactics of add."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic

TACTICS = (AtenTactic("add", batch_invariant=True),)
