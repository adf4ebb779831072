"""CPU tactics of norm_linear."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import CpuTactic

TACTICS: tuple[CpuTactic, ...] = (AtenTactic("norm_linear"),)
