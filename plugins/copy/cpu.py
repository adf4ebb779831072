"""CPU tactics of copy."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic

TACTICS = (AtenTactic("copy", batch_invariant=True),)
