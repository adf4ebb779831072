"""CPU tactics of rope_attention."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import CpuTactic

TACTICS: tuple[CpuTactic, ...] = (AtenTactic("rope_attention"),)
