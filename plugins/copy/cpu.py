"""CPU tactics of copy."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import CpuTactic
from tapeout.plugins.native.gather import NativeCopy

TACTICS: tuple[CpuTactic, ...] = (AtenTactic("copy", batch_invariant=True), NativeCopy())
