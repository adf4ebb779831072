"""CPU tactics of linear_add."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import CpuTactic

TACTICS: tuple[CpuTactic, ...] = (AtenTactic("linear_add"),)
