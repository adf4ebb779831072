"""CPU tactics of activation."""

from __future__ import annotations

from tapeout.plugins.aten import AtenTactic
from tapeout.plugins.cpu import CpuTactic
from tapeout.plugins.native.elementwise import NativeElementwise

TACTICS: tuple[CpuTactic, ...] = (AtenTactic("activation"), NativeElementwise("activation"))
