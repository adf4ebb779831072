"""CPU tactics of select_rows."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import CpuTactic
from tapeout.plugins.native.gather import NativeGather

TACTICS: tuple[CpuTactic, ...] = (
    AtenTactic("select_rows", batch_invariant=True),
    NativeGather("select_rows"),
)
