"""CPU tactics of rms_norm."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic

TACTICS = (AtenTactic("rms_norm"),)
