"""CPU tactics of add_rms_norm."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic

TACTICS = (AtenTactic("add_rms_norm"),)
