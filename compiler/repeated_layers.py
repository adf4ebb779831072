"""Layers that are alike are traced once.

Tracing takes as long as a model has layers, and most of them differ in their weights alone. Of every kind
of layer two are traced and compared; for each of the others the model is given a stand-in that leaves one
node in the graph, in whose place the nodes of the second are copied, with the layer's own weights and index.

Where anything does not fit the model is traced whole: a layer that computes with its own index or takes
something that the one before did not take, two that are alike and were not traced alike, code that does not
come with transformers.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tapeout.compiler.alike import alike, same
from tapeout.plugins.registry import OPS

_LIBRARY = torch.library.Library("tapeout_trace", "DEF")
_LIBRARY.define("edge(Tensor x, int layer, bool last) -> Tensor")
_LIBRARY.define("skipped(Tensor x, int layer) -> Tensor")
for _name in ("edge", "skipped"):
    _LIBRARY.impl(_name, lambda x, *_: torch.empty_like(x), "CompositeExplicitAutograd")
_edge = torch.ops.tapeout_trace.edge.default
_skipped = torch.ops.tapeout_trace.skipped.default

_TRACED = 2  # of every kind: the first makes what layers share (sizes), the second is what is copied


class NotRepeated(Exception):
    """The layers are less alike than they looked: trace them all."""


@dataclass(frozen=True)
class Kind:
    """Layers that are alike, by index in the order they run in."""

    members: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.members[0]

    @property
    def template(self) -> int:
        return self.members[1]

    @property
    def skipped(self) -> tuple[int, ...]:
        return self.members[_TRACED:]


@dataclass(frozen=True)
class Layers:
    """The decoder layers of a model: their list, its name in the model, and the kinds worth tracing once."""

    modules: nn.ModuleList
    name: str
    kinds: tuple[Kind, ...]

    def parameter(self, name: str, source: int, target: int) -> str:
        """The name in layer `target` of what is `name` in layer `source`; other names as they are."""
        prefix = f"{self.name}.{source}."
        return f"{self.name}.{target}.{name.removeprefix(prefix)}" if name.startswith(prefix) else name


def from_the_library(model: nn.Module) -> bool:
    """Is all of its code transformers' own? Other code may count its calls or look up numbers by a layer's
    index where `alike` cannot see it."""
    return all(type(m).__module__.partition(".")[0] in ("torch", "transformers") for m in model.modules())


def find_layers(model: nn.Module, count: int) -> Layers | None:
    """The list of `count` decoder layers, when some of them are alike; None when nothing is to be saved."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if count <= _TRACED or len(outer) != 1:
        return None
    (name,) = outer
    modules = lists[name]
    users = Counter(id(tensor) for module in modules for tensor in module.parameters())
    groups: list[list[int]] = []
    for i, module in enumerate(modules):
        if any(users[id(tensor)] > 1 for tensor in module.parameters()):
            continue  # a parameter that layers share has the name of one of them
        group = next((g for g in groups if alike(modules[g[0]], module, g[0], i)), None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    kinds = tuple(Kind(tuple(group)) for group in groups if len(group) > _TRACED)
    return Layers(modules, name, kinds) if kinds else None


class _StandIn(nn.Module):
    """In the place of a layer: one node, if the layer is called as the template of its kind was."""

    def __init__(self, layer: nn.Module, index: int, calls: _Calls, template: int) -> None:
        super().__init__()
        self._instead = (layer, index, calls, template)  # in a tuple: its parameters are not the model's

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What the model asks with isinstance is the layer's class."""
        return type(super().__getattribute__("_instead")[0])

    def __getattr__(self, name: str) -> Any:
        """What the model reads of its layers (`attention_type`) it reads of the layer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("_instead")[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _, index, calls, template = self._instead
        return calls.skip(index, template, args, kwargs)


class _Calls:
    """What the traced layers were given and gave back."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[Any, ...]] = {}
        self._gave: dict[int, Any] = {}
        self.skipped: list[int] = []

    def enter(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, rest = _hidden(args, kwargs)
        self._taken[index] = rest
        return _with_hidden(args, kwargs, _edge(x, index, False))

    def leave(self, index: int, result: Any) -> Any:
        first = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(first, torch.Tensor):
            raise NotRepeated(f"layer {index} gives {type(first).__name__}")
        self._gave[index] = result
        return _with_first(result, _edge(first, index, True))

    def skip(self, index: int, template: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, rest = _hidden(args, kwargs)
        if template not in self._gave or not same(self._taken[template], rest):
            raise NotRepeated(f"layer {index} takes other arguments than layer {template}")
        self.skipped.append(index)
        # What else a layer gives (attention weights) is the template's: using it is found in the graph.
        return _with_first(self._gave[template], _skipped(x, index))


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, torch.Tensor):
        raise NotRepeated("a layer does not take its hidden states first")
    return x, (*args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states" or args})


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor) -> Any:
    return ((x, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": x})


def _with_first(result: Any, first: torch.Tensor) -> Any:
    return (first, *result[1:]) if isinstance(result, tuple) else first


@contextmanager
def skipping(layers: Layers) -> Iterator[_Calls]:
    """While open, the model holds stand-ins for all layers of a kind but two."""
    calls = _Calls()
    with ExitStack() as undo:
        for kind in layers.kinds:
            for index in kind.members[:_TRACED]:
                module = layers.modules[index]
                for handle in (
                    module.register_forward_pre_hook(
                        lambda _, args, kwargs, i=index: calls.enter(i, args, kwargs), with_kwargs=True
                    ),
                    module.register_forward_hook(lambda _, __, result, i=index: calls.leave(i, result)),
                ):
                    undo.callback(handle.remove)
            for index in kind.skipped:
                layer = layers.modules[index]
                layers.modules[index] = _StandIn(layer, index, calls, kind.template)
                undo.callback(layers.modules.__setitem__, index, layer)
        yield calls


def expand(
    graph: fx.Graph,
    layers: Layers,
    parameters: dict[str, str],
    constants: Mapping[str, torch.Tensor],
    called: list[int],
) -> None:
    """Replace the stand-ins' nodes by copies of their templates' and remove the marks.

    Args:
        parameters: name of the parameter or buffer by placeholder target; those of the copies are added.
        constants: numbers that the code makes, by placeholder target; copies share them.
        called: the stand-ins that ran.

    Raises:
        NotRepeated: the graph is not what it would be had all layers been traced, as far as can be told.
    """
    if sorted(called) != sorted(i for kind in layers.kinds for i in kind.skipped):
        raise NotRepeated("a layer runs more or less than once")
    order = {node: i for i, node in enumerate(graph.nodes)}
    bodies = {index: _Body(graph, index, order) for kind in layers.kinds for index in kind.members[:_TRACED]}
    placeholders = {node.target: node for node in graph.find_nodes(op="placeholder")}
    names = {placeholders[target]: name for target, name in parameters.items() if target in placeholders}
    numbers = {placeholders[target]: value for target, value in constants.items() if target in placeholders}
    for kind in layers.kinds:
        _check_equal(bodies[kind.first], bodies[kind.template], layers, names, numbers)
    copier = _Copier(graph, layers, parameters, names)
    for node in list(graph.find_nodes(op="call_function", target=_skipped)):
        index = node.args[1]
        kind = next(k for k in layers.kinds if index in k.skipped)
        copier.put(node, bodies[kind.template], kind.template, index)
    for node in list(graph.find_nodes(op="call_function", target=_edge)):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


class _Body:
    """The nodes of a traced layer between its marks."""

    def __init__(self, graph: fx.Graph, index: int, order: Mapping[fx.Node, int]) -> None:
        edges = [n for n in graph.find_nodes(op="call_function", target=_edge) if n.args[1] == index]
        if [n.args[2] for n in edges] != [False, True]:
            raise NotRepeated(f"layer {index} runs more or less than once")
        self.index = index
        self.begin, self.end = edges
        between = range(order[self.begin] + 1, order[self.end])
        nodes = list(graph.nodes)
        self.nodes = [nodes[i] for i in between]
        inside = {self.begin, *self.nodes}
        for node in self.nodes:
            if not _is_size(node) and any(user not in inside and user is not self.end for user in node.users):
                raise NotRepeated(f"{node.name} of layer {index} is used after it")
        if self.end.args[0] not in inside:
            raise NotRepeated(f"layer {index} gives what it did not make")


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _check_equal(
    a: _Body,
    b: _Body,
    layers: Layers,
    names: Mapping[fx.Node, str],
    numbers: Mapping[fx.Node, torch.Tensor],
) -> None:
    """Two layers that are alike were traced alike, but for weights and indices. Sizes are compared by value,
    because the first layer to ask for one makes it for all."""
    left, right = ([n for n in body.nodes if not _is_size(n)] for body in (a, b))
    if len(left) != len(right):
        raise NotRepeated(f"layers {a.index} and {b.index} have {len(left)} and {len(right)} nodes")
    partner = {a.begin: b.begin}

    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, fx.Node) and isinstance(y, fx.Node):
            if _is_size(x) or _is_size(y):
                return _size(x) == _size(y)
            if x in names and y in names:
                return layers.parameter(names[x], a.index, b.index) == names[y]
            if x in numbers and y in numbers:
                return numbers[x].dtype == numbers[y].dtype and torch.equal(numbers[x], numbers[y])
            return partner.get(x, x) is y
        if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
            return len(x) == len(y) and all(map(equal, x, y))
        if isinstance(x, fx.Node) or isinstance(y, fx.Node):
            return _size(x) == _size(y)
        return type(x) is type(y) and bool(x == y)

    for x, y in zip(left, right, strict=True):
        place = _index_place(x)
        same = x.target is y.target and all(
            place == i or equal(p, q) for i, (p, q) in enumerate(zip(x.args, y.args, strict=False))
        )
        if (
            not same
            or len(x.args) != len(y.args)
            or x.kwargs.keys() != y.kwargs.keys()
            or not all(equal(x.kwargs[k], y.kwargs[k]) for k in x.kwargs)
        ):
            raise NotRepeated(f"{x.name} of layer {a.index} is not {y.name} of layer {b.index}")
        partner[x] = y
    if partner.get(a.end.args[0]) is not b.end.args[0]:
        raise NotRepeated(f"layers {a.index} and {b.index} give different nodes")


def _size(value: Any) -> str | None:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    return str(value) if isinstance(value, (int, torch.SymInt)) else None


def _index_place(node: fx.Node) -> int | None:
    """Where among its arguments an op of ours takes the index of its layer."""
    if getattr(node.target, "namespace", "") != "tapeout":
        return None
    arguments = [a.name for a in node.target._schema.arguments]
    return arguments.index("layer") if "layer" in OPS[node.target._opname].attrs else None


class _Copier:
    """Puts copies of a layer's nodes into the graph."""

    def __init__(
        self,
        graph: fx.Graph,
        layers: Layers,
        parameters: dict[str, str],
        names: Mapping[fx.Node, str],
    ) -> None:
        self._graph, self._layers, self._parameters, self._names = graph, layers, parameters, names

    def put(self, node: fx.Node, body: _Body, source: int, target: int) -> None:
        """In the place of a stand-in's node."""
        made: dict[fx.Node, fx.Node] = {body.begin: node.args[0]}

        def argument(value: fx.Node) -> fx.Node:
            if value not in made and value in self._names:
                made[value] = self._placeholder(value, source, target)
            return made.get(value, value)

        with self._graph.inserting_before(node):
            for original in body.nodes:
                new = self._graph.node_copy(original, argument)
                if (place := _index_place(new)) is not None:
                    new.args = (*new.args[:place], target, *new.args[place + 1 :])
                if stack := original.meta.get("nn_module_stack"):
                    new.meta["nn_module_stack"] = self._moved(stack, source, target)
                made[original] = new
        node.replace_all_uses_with(made[body.end.args[0]])
        self._graph.erase_node(node)

    def _placeholder(self, original: fx.Node, source: int, target: int) -> fx.Node:
        name = self._names[original]
        moved = self._layers.parameter(name, source, target)
        if moved == name:
            return original
        with self._graph.inserting_after(original):
            node = self._graph.placeholder(f"{original.name}_in_{target}")
        node.meta = copy.copy(original.meta)
        self._parameters[str(node.target)] = moved
        return node

    def _moved(self, stack: Mapping[str, Any], source: int, target: int) -> dict[str, Any]:
        own = re.compile(re.escape(self._layers.name) + rf"\.{source}(?=\.|$)")
        name = f"{self._layers.name}.{target}"
        return {own.sub(name, key): (own.sub(name, path), *rest) for key, (path, *rest) in stack.items()}
