"""Fuse rotary position embedding: one table a step, one `tapeout::rope` for queries and for keys.

Models spell the rotation in many ways (halves, pairs, parts of heads, complex numbers, tables made
ahead). What lies between a tensor of heads and its rotated form is cut out and run on numbers; it is
fused when `rope` gives the same for one of the frequency vectors the part is made from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, dtype, shape, to_numpy
from tapeout.compiler.probe import Probe, Region, known_nodes, regions_above
from tapeout.plugins.rope.reference import rope
from tapeout.plugins.rope_table.reference import rope_table

_ALLOWED = frozenset({
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.cat.default, aten.stack.default,
    aten.slice.Tensor, aten.select.int, aten.view.default, aten.reshape.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.to.dtype, aten.split.Tensor,
    aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.view_as_complex.default,
    aten.view_as_real.default, aten.expand.default, aten.index.Tensor,
})  # fmt: skip
# Far apart and without a common divisor; tables made ahead of time may be short, hence the second try.
_POSITIONS = ((0, 1, 2, 3, 5, 8, 13, 100, 1_001, 4_093), (0, 1, 2, 3, 5, 8, 13, 34, 55, 61))
_MOST_STEPS = 8  # from a product with a cosine to the end of the rotation
_TOLERANCE = 2e-5  # of float32 at these positions


@dataclass(frozen=True)
class _Rotation:
    inv_freq: torch.Tensor  # [rotary_dim / 2] float32
    scaling: float
    interleaved: bool
    split: bool = False  # the first elements of all pairs come before all the second ones afterwards


def fuse_rope(graph: Graph) -> int:
    """Returns the number of tensors rotated (two a layer in most models)."""
    known = known_nodes(graph)
    probes = [Probe(graph, torch.tensor(p)) for p in _POSITIONS]
    tables: dict[tuple[object, ...], fx.Node] = {}
    done: set[fx.Node] = set()
    count = 0
    for sink in _ends(graph, known):
        if sink in done:
            continue
        for region in reversed(regions_above([sink], known, _allowed)):
            if (axis := _rows_axis(region)) is None:
                continue
            rotation = _rotation(graph, region, axis, known, probes)
            if rotation is not None:
                _replace(graph, region, axis, rotation, tables)
                done |= region.nodes
                count += 1
                break
    return count


def _allowed(node: fx.Node) -> bool:
    return node.target in _ALLOWED or getattr(node.target, "__name__", "") == "getitem"


def _ends(graph: Graph, known: set[fx.Node]) -> Iterator[fx.Node]:
    """Where rotations may end, the last first: what follows within a few steps from a product of an
    activation with something that depends on the position."""
    reached: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in known:
            continue
        steps = [reached[n] + 1 for n in node.all_input_nodes if n in reached]
        if node.target is aten.mul.Tensor and any(isinstance(a, fx.Node) and a in known for a in node.args):
            steps.append(0)
        if steps and max(steps) <= _MOST_STEPS and _allowed(node):
            reached[node] = max(steps)
    return iter(sorted(reached, reverse=True))


def _rows_axis(region: Region) -> int | None:
    """The axis of rows when source and sink are heads `[1, H, T, D]` or `[1, T, H, D]` of one shape."""
    source, sink = (node.meta.get("val") for node in (region.source, region.sinks[0]))
    if not isinstance(source, torch.Tensor) or not isinstance(sink, torch.Tensor) or source.is_complex():
        return None
    shapes = [tuple(t.shape) for t in (source, sink)]
    if source.dim() == 3:  # the one head of latent attention, before it is called a head
        shapes[0] = (shapes[0][0], 1, *shapes[0][1:])
    axes = {tuple(i for i, s in enumerate(sizes) if not isinstance(s, int)) for sizes in shapes}
    if [len(s) for s in shapes] != [4, 4] or axes not in ({(1,)}, {(2,)}) or shapes[0][3] != shapes[1][3]:
        return None
    return int(axes.pop()[0])


def _rotation(
    graph: Graph, region: Region, axis: int, known: set[fx.Node], probes: list[Probe]
) -> _Rotation | None:
    """What the region does to its heads; None when it is no rotation by position."""
    candidates = list(_frequencies(graph, region, known))
    for probe, positions in zip(probes, _POSITIONS, strict=True):
        x = torch.randn(probe.shape(region.source), generator=torch.Generator().manual_seed(0))
        try:
            y = probe.value(region.sinks[0], {region.source: x})
        except IndexError:
            continue  # a table that ends before the last position
        except (LookupError, RuntimeError):
            return None
        x = x.unsqueeze(1) if x.dim() == 3 else x
        if y.shape != x.shape:
            return None
        rows, turned = (t.transpose(1, 2)[0] if axis == 2 else t[0] for t in (x, y.float()))
        return _fit(rows, turned, torch.tensor(positions), candidates)
    return None


def _frequencies(graph: Graph, region: Region, known: set[fx.Node]) -> Iterator[torch.Tensor]:
    """Vectors of constants that the region is made from."""
    seen: set[fx.Node] = set()
    left = [a for n in region.nodes for a in n.all_input_nodes if a in known]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        left += node.all_input_nodes
        name = graph.weight_name(node)
        if name is not None and graph.constants[name].ndim == 1 and graph.constants[name].dtype.kind == "f":
            yield torch.from_numpy(graph.constants[name].astype(np.float32))


def _fit(
    x: torch.Tensor, y: torch.Tensor, positions: torch.Tensor, candidates: list[torch.Tensor]
) -> _Rotation | None:
    """The rotation that makes y [N, H, D] of x; position 0 shows the scaling."""
    changed = (y != x).flatten(0, 1).any(0)
    if not bool(changed.any()):
        return None
    last = int(changed.nonzero().max()) + 1  # elements behind it pass through
    candidates = [*candidates, *_geometric(x, y, positions, last + last % 2)]
    for inv_freq in candidates:
        turned = 2 * inv_freq.shape[0]
        if not last <= turned <= x.shape[-1]:
            continue
        # Position 0 turns nothing, whatever becomes of the order: the lengths show the scaling.
        scaling = float((y[0, :, :turned].square().sum() / x[0, :, :turned].square().sum()).sqrt())
        for sign in (1, -1):
            table = rope_table(positions, sign * inv_freq, scaling, "float32")
            for interleaved in (False, True):
                turned_x = rope(x, table, interleaved)
                for split in {False, interleaved and turned == x.shape[-1]}:
                    got = _split_pairs(turned_x) if split else turned_x
                    if torch.allclose(got, y, rtol=_TOLERANCE, atol=_TOLERANCE * scaling):
                        return _Rotation(sign * inv_freq, _rounded(scaling), interleaved, split)
    return None


def _split_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


def _geometric(
    x: torch.Tensor, y: torch.Tensor, positions: torch.Tensor, turned: int
) -> Iterator[torch.Tensor]:
    """base ** (-2 i / turned), the base read off the second pair at position 1: for tables made ahead."""
    if turned < 4 or turned > x.shape[-1]:
        return
    for first, second in ((2, 3), (1, 1 + turned // 2)):
        a, b = torch.complex(x[1, 0, first], x[1, 0, second]), torch.complex(y[1, 0, first], y[1, 0, second])
        angle = float(torch.angle(b / a))
        if 0 < angle < 1:
            base = float(round(angle ** (-turned / 2)))
            yield 1.0 / (base ** (torch.arange(0, turned, 2, dtype=torch.int64) / turned))


def _rounded(scaling: float) -> float:
    """Without the noise of the estimate; YaRN's factors are no round numbers and stay."""
    near = float(np.format_float_positional(np.float32(scaling), precision=5, unique=True))
    return near if abs(near - scaling) < 1e-6 else scaling


def _replace(
    graph: Graph, region: Region, axis: int, rotation: _Rotation, tables: dict[tuple[object, ...], fx.Node]
) -> None:
    x, sink = _before_widening(region.source), region.sinks[0]
    if x.meta["val"].dim() == 3:
        x = graph.call(sink, aten.unsqueeze.default, x, 1)
    name = str(dtype(x)).removeprefix("torch.")
    key = (rotation.inv_freq.numpy().tobytes(), rotation.scaling, name)
    if key not in tables:
        tables[key] = _table(graph, rotation, name)
    # The fused op works on [1, T, H, D], as tensors lie before and after the model's transposes.
    rows = graph.call(sink, aten.transpose.int, x, 1, 2) if axis == 2 else x
    result = graph.call(sink, torch.ops.tapeout.rope.default, rows, tables[key], rotation.interleaved)
    if rotation.split:
        heads, dim = (int(s) for s in shape(result)[2:])
        result = graph.call(sink, aten.reshape.default, result, [1, -1, heads, dim // 2, 2])
        result = graph.call(sink, aten.transpose.int, result, 3, 4)
        result = graph.call(sink, aten.reshape.default, result, [1, -1, heads, dim])
    if axis == 2:
        result = graph.call(sink, aten.transpose.int, result, 1, 2)
    if dtype(sink) != dtype(x):
        result = graph.call(sink, aten.to.dtype, result, dtype(sink))
    sink.replace_all_uses_with(result)


def _before_widening(node: fx.Node) -> fx.Node:
    """Some models rotate in float32; rope rounds where most models do."""
    return node.args[0] if node.target is aten.to.dtype and dtype(node) is torch.float32 else node


def _table(graph: Graph, rotation: _Rotation, name: str) -> fx.Node:
    positions = next(n for n in graph.graph.find_nodes(op="placeholder") if n.name == "positions")
    frequencies = graph.add_constant("rope.inv_freq", to_numpy(rotation.inv_freq))
    # Where the model begins with its own table, so that every rotation comes after it.
    first = min(n for n in positions.users if n.target is not aten.sym_size.int)
    return graph.call(
        first, torch.ops.tapeout.rope_table.default, positions, frequencies, rotation.scaling, name
    )
