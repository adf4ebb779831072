"""Compiler graphs made from modules of a few lines, and the two things a pass test says about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export import Dim

from tapeout.compiler.graph import Graph, read_weights, to_numpy
from tapeout.compiler.passes.canonicalize import canonicalize
from tapeout.compiler.trace import _to_graph
from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import CONST_PREFIX, WeightRef, run_recipe


def ops(graph: Graph) -> Counter[str]:
    """How often each op is called; `aten.add.Tensor`, `tapeout.rope.default`, `getitem`."""
    return Counter(_op_name(n) for n in graph.graph.nodes if n.op == "call_function")


def _op_name(node: fx.Node) -> str:
    return str(node.target) if "." in str(node.target) else str(node.target.__name__)


class SmallGraph:
    """A compiler graph made from a module of a few lines; inputs are named as its arguments.

    T is dynamic in every `[1, T, ...]` input, the length in inputs named in `rows`. The
    module's parameters are its weights; `run` executes the graph on the inputs given.
    """

    def __init__(
        self, module: nn.Module, inputs: Mapping[str, torch.Tensor], rows: tuple[str, ...] = ()
    ) -> None:
        self.module, self.inputs = module.eval(), dict(inputs)
        dynamic = {name: {0: Dim.DYNAMIC} if name in rows else {1: Dim.DYNAMIC} for name in inputs}
        oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=True)
        with oblivious, torch.no_grad():
            program = torch.export.export(
                module, (), kwargs=dict(inputs), dynamic_shapes=dynamic, strict=False
            )
        tensors = dict(module.state_dict())

        def weight(name: str) -> WeightRef:
            dtype = str(tensors[name].dtype).removeprefix("torch.")
            return WeightRef.of(TensorInfo(name, dtype, tuple(tensors[name].shape)))

        signature = program.graph_signature
        parameters = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self.graph = _to_graph(program, parameters, module, 1, weight, dict(module.named_buffers()))
        canonicalize(self.graph)
        self.graph.tidy()
        self.graph.recompile()

    def apply(self, pass_: Callable[[Graph], int]) -> int:
        """The pass as the driver runs it: the pass, canonicalize, tidy."""
        count = pass_(self.graph)
        canonicalize(self.graph)
        self.graph.tidy()
        self.graph.recompile()
        return count

    def ops(self) -> Counter[str]:
        return ops(self.graph)

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.module.state_dict()

        def read(name: str) -> np.ndarray:
            if name.startswith(CONST_PREFIX):
                return self.graph.constants[name.removeprefix(CONST_PREFIX)]
            return to_numpy(state[name])

        return read_weights(self.graph, lambda ref: run_recipe(ref, read))

    def run(self) -> torch.Tensor:
        """The graph's first output."""
        args = [
            self.weights()[n.meta["weight"]] if "weight" in n.meta else self.inputs[n.name]
            for n in self.graph.graph.find_nodes(op="placeholder")
        ]
        with torch.no_grad():
            outputs = self.graph.module(*args)
        first: torch.Tensor = outputs[0]
        return first

    def expected(self) -> torch.Tensor:
        """What the module itself returns (its first output)."""
        with torch.no_grad():
            result = self.module(**self.inputs)
        first: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return first


HIDDEN, HEADS, KV_HEADS, T = 8, 2, 1, 5
Make = Callable[..., Any]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Lines(nn.Module):
    """A module whose forward is a function of itself and its inputs, with random parameters and buffers."""

    def __init__(
        self,
        function: Callable[..., Any],
        buffers: dict[str, torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        **shapes: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.function = function
        for seed, (name, shape) in enumerate(shapes.items(), start=1):
            setattr(self, name, nn.Parameter(randn(*shape, seed=seed, dtype=dtype)))
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value, persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        row_ids: torch.Tensor | None = None,
    ) -> Any:
        optional = {"y": y, "positions": positions, "row_ids": row_ids}
        return self.function(self, x, **{k: v for k, v in optional.items() if v is not None})


def check(graph: Any, pass_: Callable[[Graph], int], count: int, before: str, after: str) -> None:
    """The pass matches `count` places, turns ops `before` into `after`, and changes no result."""

    def short(counter: Counter[str]) -> str:
        found = {
            k.removesuffix(".default").removesuffix(".Tensor").removesuffix(".int"): v
            for k, v in counter.items()
        }
        return " ".join(f"{k}*{v}" if v > 1 else k for k, v in sorted(found.items()))

    assert short(graph.ops()) == before
    assert graph.apply(pass_) == count
    assert short(graph.ops()) == after
    torch.testing.assert_close(graph.run(), graph.expected(), atol=2e-5, rtol=2e-5)


def unchanged(graph: Any, pass_: Callable[[Graph], int]) -> None:
    """A near miss: no match, the same ops, and still the right result."""
    before = graph.ops()
    assert graph.apply(pass_) == 0
    assert graph.ops() == before
    torch.testing.assert_close(graph.run(), graph.expected(), atol=2e-5, rtol=2e-5)


def norm(x: torch.Tensor, weight: torch.Tensor, dim: int = -1, eps: float = 1e-5) -> torch.Tensor:
    """RMSNorm as Llama's code spells it."""
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(dim, keepdim=True) + eps)
    return weight * y.to(x.dtype)
