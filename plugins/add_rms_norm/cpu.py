"""CPU tactics of add_rms_norm."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import CpuTactic
from tapeout.plugins.rms_norm.cpu import NativeRmsNorm

TACTICS: tuple[CpuTactic, ...] = (AtenTactic("add_rms_norm"), NativeRmsNorm("add_rms_norm"))
