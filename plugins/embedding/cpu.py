"""CPU tactics of embedding."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import CpuTactic
from tapeout.plugins.native.gather import NativeGather

TACTICS: tuple[CpuTactic, ...] = (AtenTactic("embedding", batch_invariant=True), NativeGather("embedding"))
