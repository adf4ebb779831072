"""Launches of one op used as a part of another: operands elsewhere than the op alone would have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tapeout.plugins.cuda import Arg, LaunchSpec


def to_workspace(
    launch: LaunchSpec, role: str, index: int, offset_bytes: int, strides: Sequence[int]
) -> LaunchSpec:
    """The launch with an operand in the workspace.

    Args:
        role: `input` or `output`. index: which one.
        offset_bytes: where it starts, a multiple of 16.
        strides: elements between steps of every dimension but the last; multiples of 16.
    """

    def moved(arg: Arg) -> Arg:
        if arg.index != index or arg.kind not in {role, f"{role}_stride"}:
            return arg
        if arg.kind == role:
            return Arg("workspace", value=offset_bytes)
        return Arg("i32", value=strides[int(arg.value)])

    return replace(launch, args=tuple(map(moved, launch.args)))


def shift_weights(launch: LaunchSpec, by: int) -> LaunchSpec:
    """The launch with its weights `by` places further in the record."""

    def shifted(arg: Arg) -> Arg:
        return replace(arg, index=arg.index + by) if arg.kind == "weight" else arg

    return replace(launch, args=tuple(map(shifted, launch.args)))
