"""The traced graph and what passes need to edit it.

A `Graph` is an FX graph of ATen ops and `tapeout::` ops. Its placeholders are the step
inputs first, then one per weight; weights are references, never bytes. The graph stays
executable: `run_graph` feeds it tensors made from the references.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from tapeout.model_defs.recipe_steps import np_dtype
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.registry import OPS, register_torch_ops

register_torch_ops()  # passes name `torch.ops.tapeout.<op>` when they are imported
aten = torch.ops.aten


@dataclass
class Graph:
    """A model being compiled.

    Attributes:
        module: the FX graph; placeholders carry `meta["val"]`, as do all nodes.
        weights: weight name (a placeholder's `meta["weight"]`) to its reference.
        constants: arrays for sources named `const:<name>`.
        attention_layers: number of attention ops the trace saw.
    """

    module: fx.GraphModule
    weights: dict[str, WeightRef]
    constants: dict[str, np.ndarray]
    attention_layers: int
    fake_mode: FakeTensorMode

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def copy(self) -> Graph:
        """The same graph with nodes of its own, for passes that another target does not want."""
        module = fx.GraphModule(self.module, copy.deepcopy(self.graph))
        return replace(self, module=module, weights=dict(self.weights), constants=dict(self.constants))

    def nodes(self, target: Any) -> list[fx.Node]:
        """All calls of one op overload, in graph order."""
        return list(self.graph.find_nodes(op="call_function", target=target))

    def weight_name(self, node: object) -> str | None:
        """The weight a placeholder stands for; None for anything else."""
        return node.meta.get("weight") if isinstance(node, fx.Node) else None

    def weight_of(self, node: fx.Node) -> tuple[str, WeightRef]:
        """Name and reference of the weight a placeholder stands for; KeyError for anything else."""
        name: str = node.meta["weight"]
        return name, self.weights[name]

    def add_input(self, name: str, value: torch.Tensor) -> fx.Node:
        """A new step input after the existing ones; returns an existing one of that name."""
        for node in self.graph.find_nodes(op="placeholder"):
            if node.name == name:
                return node
        first_weight = next(n for n in self.graph.find_nodes(op="placeholder") if "weight" in n.meta)
        with self.graph.inserting_before(first_weight):
            node = self.graph.placeholder(name)
        node.meta["val"] = self.fake_mode.from_tensor(value)
        return node

    def add_weight(self, name: str, ref: WeightRef) -> fx.Node:
        """A new weight placeholder; the name must be free."""
        if name in self.weights:
            raise ValueError(f"weight {name} exists already")
        last = list(self.graph.find_nodes(op="placeholder"))[-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(weight_placeholder(name))
        node.meta["weight"] = name
        with self.fake_mode:
            node.meta["val"] = torch.empty(ref.shape, dtype=getattr(torch, ref.dtype))
        self.weights[name] = ref
        return node

    def add_constant(self, name: str, array: np.ndarray) -> fx.Node:
        """A new weight with these values; one that exists already is returned, whatever its name."""
        for node in self.graph.find_nodes(op="placeholder"):
            have = self.constants.get(node.meta.get("weight", ""))
            if have is not None and have.dtype == array.dtype and np.array_equal(have, array):
                return node
        names = (f"{name}.{i}" if i else name for i in itertools.count())
        free = next(n for n in names if n not in self.weights and n not in self.constants)
        self.constants[free] = array
        return self.add_weight(free, WeightRef.const(free, array.dtype.name, array.shape))

    def call(self, before: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Insert a call in front of `before`, in the same module, and infer its result type."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        if "nn_module_stack" in before.meta:
            node.meta["nn_module_stack"] = before.meta["nn_module_stack"]
        self.infer(node)
        return node

    def infer(self, node: fx.Node) -> None:
        """Fill in `meta["val"]` of a call from its arguments."""
        args, kwargs = tree_map(
            lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs)
        )
        assert callable(node.target)
        with self.fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)

    def tidy(self) -> None:
        """Remove dead calls and unused weights, check the graph. Its code is made by `recompile`."""
        self.graph.eliminate_dead_code(is_impure_node=_is_impure)
        for node in list(self.graph.find_nodes(op="placeholder")):
            name = node.meta.get("weight")
            if name is not None and not node.users:
                self.graph.erase_node(node)
        used = {n.meta.get("weight") for n in self.graph.find_nodes(op="placeholder")}
        self.weights = {name: ref for name, ref in self.weights.items() if name in used}
        self.graph.lint()

    def recompile(self) -> None:
        """Make the module's code from the graph, to run or to print it: as dear as a pass."""
        self.module.recompile()


def _is_impure(node: fx.Node) -> bool:
    name = custom_name(node)
    return node.op in {"placeholder", "output"} or (name is not None and OPS[name].reads_cache)


def custom_name(node: fx.Node) -> str | None:
    """The op a node calls of our vocabulary; None for other nodes."""
    return node.target._opname if getattr(node.target, "namespace", "") == "tapeout" else None


def weight_placeholder(name: str) -> str:
    """The placeholder name of a weight."""
    return "w_" + name.replace(".", "_")


def shape(node: fx.Node) -> tuple[Any, ...]:
    """The node's (symbolic) shape."""
    return tuple(node.meta["val"].shape)


def dtype(node: fx.Node) -> torch.dtype:
    """The node's dtype."""
    return node.meta["val"].dtype


def read_weights(graph: Graph, run_recipe: Callable[[WeightRef], np.ndarray]) -> dict[str, torch.Tensor]:
    """All weights as torch tensors on the CPU (for tests and small models only)."""
    return {name: from_numpy(run_recipe(ref)) for name, ref in graph.weights.items()}


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A torch tensor of the array's type; bfloat16 through ml_dtypes."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The inverse of `from_numpy`, for CPU tensors."""
    if tensor.dtype is torch.bfloat16:
        return tensor.detach().contiguous().view(torch.uint16).numpy().view(np_dtype("bfloat16"))
    return tensor.detach().contiguous().numpy()


def run_graph(
    graph: Graph, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Execute the graph as it stands.

    Args:
        weights: by weight name. inputs: step inputs by placeholder name.

    Returns:
        Logits `[1, R, vocab]`.
    """
    args = [
        weights[node.meta["weight"]] if "weight" in node.meta else inputs[node.name]
        for node in graph.graph.find_nodes(op="placeholder")
    ]
    with torch.no_grad():
        (logits,) = graph.module(*args)
    return logits
