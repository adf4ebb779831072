"""CPU tactics of scale."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic

TACTICS = (AtenTactic("scale", batch_invariant=True),)
