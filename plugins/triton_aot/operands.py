"""Fill in the arguments of a launch from tensors: what checks and interpreters run kernels with.

The planner does the same with addresses in the arena. Needs torch only for the tensors it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tapeout.plugins.cuda import Arg, GridDim, LaunchSpec
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.op import AttrValue

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Operands:
    """The tensors of one op; `workspace` is a byte tensor of at least `workspace_bytes`."""

    inputs: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    step: Mapping[str, torch.Tensor]
    workspace: torch.Tensor
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    scalars: Mapping[str, int] = field(default_factory=dict)  # layers, max_pages, …

    def value(self, arg: Arg) -> torch.Tensor | int | float:
        """A tensor for a pointer (its data start is the address), a number for the rest."""
        if arg.kind == "input_stride":
            return self.inputs[arg.index].stride(int(arg.value))
        if arg.kind == "output_stride":
            return self.outputs[arg.index].stride(int(arg.value))
        if arg.kind == "workspace":
            return self.workspace[int(arg.value) :]
        if arg.kind in {"i32", "i64", "f32"}:
            return arg.value
        if arg.kind in self.scalars:
            return self.scalars[arg.kind]
        if arg.kind == "attr":
            return int(self.attrs[arg.name])
        if arg.kind == "step":
            return self.step[arg.name]
        pointers = {"input": self.inputs, "weight": self.weights, "output": self.outputs}
        if arg.kind not in pointers:
            raise UnsupportedError(f"argument kind {arg.kind!r} is not known")
        return pointers[arg.kind][arg.index]


def grid_of(launch: LaunchSpec, rows: int) -> tuple[int, int, int]:
    """Blocks of a launch at a bucket of `rows` padded rows."""

    def blocks(dim: GridDim) -> int:
        return (-(-rows // dim.per_block) if dim.per_block else 1) * dim.times

    x, y, z = map(blocks, launch.grid)
    return x, y, z
