"""CPU tactics of embedding."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic

TACTICS = (AtenTactic("embedding", batch_invariant=True),)
