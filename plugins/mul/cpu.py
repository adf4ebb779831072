"""CPU tactics of mul."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic

TACTICS = (AtenTactic("mul", batch_invariant=True),)
