"""CPU tactics of gated_activation."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic

TACTICS = (AtenTactic("gated_activation"),)
