"""Canonicalize: one spelling for what Hugging Face code spells in many ways.

Removes what export adds (metadata asserts, device moves) and what changes nothing (casts to
the same dtype, full slices, pairs of transposes), so that later passes see plain arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten

_INT_MAX = 2**62

_IDENTITY = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.detach_.default,
        aten.dropout.default,
        aten.lift_fresh_copy.default,
    }
)
_CASTS = frozenset(
    {
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten.to.other,
        aten._to_copy.default,
        aten.type_as.default,
    }
)
# Calls that only change how elements are grouped.
_RESHAPES = frozenset(
    {
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.view_as.default,
        aten.reshape_as.default,
        aten.squeeze.default,
        aten._unsafe_view.default,
    }
)
# Ops whose result shares memory with no other tensor, as far as in-place calls follow them.
_MAKES_NEW = frozenset(
    {
        *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")),
        aten.matmul.default,
        aten.bmm.default,
        aten.linear.default,
        aten.zeros_like.default,
        aten.zeros.default,
        aten.topk.default,
        aten.gather.default,
        aten.softmax.int,
        aten.sigmoid.default,
        aten.embedding.default,
        aten.index.Tensor,
        aten.masked_fill.Scalar,
        operator.getitem,
    }
)
_IN_PLACE = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.scatter_.value: aten.scatter.value,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.relu_.default: aten.relu.default,
}


def canonicalize(graph: Graph) -> int:
    """Rewrite until nothing changes; returns the number of nodes removed."""
    return canonicalize_nodes(graph.graph)


def canonicalize_nodes(graph: fx.Graph) -> int:
    """The rewrites on a bare FX graph whose nodes carry `meta["val"]`."""
    before = len(graph.nodes)
    changed = True
    while changed:
        changed = False
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is aten._assert_tensor_metadata.default:
                graph.erase_node(node)
                changed = True
                continue
            if node.target is aten.broadcast_to.default:
                node.target = aten.expand.default
            if node.target in _CASTS:
                _normalize_cast(node)
            elif node.target in _RESHAPES or _has_computed_size(node):
                _normalize_reshape(node)
            elif node.target in _IN_PLACE:
                _normalize_in_place(node)
            source = next((s for rule in _RULES if (s := rule(node)) is not None), None)
            if source is not None:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
                changed = True
    return before - len(graph.nodes)


def _same_type(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return (
        x.dtype == y.dtype
        and len(x.shape) == len(y.shape)
        and all(_equal(s, t) for s, t in zip(x.shape, y.shape, strict=True))
    )


def _equal(a: object, b: object) -> bool:
    return (a.node.expr if isinstance(a, torch.SymInt) else a) == (
        b.node.expr if isinstance(b, torch.SymInt) else b
    )


def _normalize_cast(node: fx.Node) -> None:
    """Every cast becomes `to.dtype(x, dtype)`: devices and layouts do not exist in the graph."""
    if node.target is not aten.to.dtype or len(node.args) != 2 or node.kwargs:
        node.target = aten.to.dtype
        node.args = (node.args[0], node.meta["val"].dtype)
        node.kwargs = {}


def _normalize_reshape(node: fx.Node) -> None:
    """Every reshape becomes `reshape(x, sizes)`; the one symbolic size is -1."""
    sizes = [s if isinstance(s, int) else -1 for s in node.meta["val"].shape]
    if sizes.count(-1) <= 1:
        node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], sizes), {}


def _has_computed_size(node: fx.Node) -> bool:
    """A view whose size is arithmetic on the number of rows, such as the least of it and a limit."""
    if node.target not in {aten.view.default, aten.reshape.default}:
        return False
    return any(isinstance(s, fx.Node) and s.target is not aten.sym_size.int for s in node.args[1])


def _normalize_in_place(node: fx.Node) -> None:
    """`x.op_()` becomes `op(x)` where nobody could see that x has changed: x itself is not read later,
    and it shares its memory with nothing (it is the result of an op that makes a new tensor)."""
    source = node.args[0]
    made_new = source.op == "call_function" and source.target in _MAKES_NEW
    if made_new and all(user <= node for user in source.users):
        node.target = _IN_PLACE[node.target]


def _identity(node: fx.Node) -> fx.Node | None:
    return node.args[0] if node.target in _IDENTITY else None


def _same_shape(node: fx.Node) -> fx.Node | None:
    """Casts, views and expands that keep dtype and shape."""
    if node.target in {aten.to.dtype, aten.view.default, aten.reshape.default, aten.expand.default}:
        return node.args[0] if _same_type(node, node.args[0]) else None
    return None


def _there_and_back(node: fx.Node) -> fx.Node | None:
    """A cast to float32 of a 16-bit float, and back."""
    inner = node.args[0]
    if (
        node.target is not aten.to.dtype
        or not isinstance(inner, fx.Node)
        or inner.target is not aten.to.dtype
    ):
        return None
    wide = inner.meta["val"].dtype is torch.float32
    return inner.args[0] if wide and _same_type(node, inner.args[0]) else None


def _full_slice(node: fx.Node) -> fx.Node | None:
    """A slice of everything, with step 1 (step 2 is interleaved RoPE and must stay)."""
    if node.target is not aten.slice.Tensor or (len(node.args) > 4 and node.args[4] != 1):
        return None
    start = node.args[2] if len(node.args) > 2 else 0
    end = node.args[3] if len(node.args) > 3 else None
    open_ended = end is None or (isinstance(end, int) and end >= _INT_MAX)
    return node.args[0] if start in (0, None) and open_ended else None


def _cat_with_nothing(node: fx.Node) -> fx.Node | None:
    """A concatenation in which all but one tensor are empty, as partial rotary over whole heads leaves it."""
    if node.target is not aten.cat.default:
        return None
    tensors = [t for t in node.args[0] if 0 not in t.meta["val"].shape]
    return tensors[0] if len(tensors) == 1 and _same_type(node, tensors[0]) else None


def _slice_of_cat(node: fx.Node) -> fx.Node | None:
    """A slice of a concatenation that is exactly one of its parts; transposes between are looked through."""
    if node.target is not aten.slice.Tensor or (len(node.args) > 4 and node.args[4] != 1):
        return None
    between, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    rank = len(node.meta["val"].shape)
    cat = between
    if between.target is aten.transpose.int and int(dim) % rank == rank - 1:
        cat = between.args[0]
        if (rank - 1) in {int(d) % rank for d in between.args[1:3]}:
            return None
    if (
        cat.target is not aten.cat.default
        or (cat.args[1] if len(cat.args) > 1 else 0) % rank != int(dim) % rank
    ):
        return None
    start = 0
    for part in cat.args[0]:
        stop = start + part.meta["val"].shape[dim]
        end = node.args[3] if len(node.args) > 3 else None
        last = part is cat.args[0][-1] and (end is None or (isinstance(end, int) and end >= _INT_MAX))
        if (node.args[2] or 0) == start and (last or end == stop):
            if cat is between:
                return part
            with node.graph.inserting_before(node):
                turned = node.graph.call_function(aten.transpose.int, (part, *between.args[1:]))
            turned.meta["val"] = node.meta["val"]
            return turned
        start = stop
    return None


def _transpose_pair(node: fx.Node) -> fx.Node | None:
    inner = node.args[0]
    if (
        node.target is not aten.transpose.int
        or not isinstance(inner, fx.Node)
        or inner.target is not aten.transpose.int
    ):
        return None
    rank = len(node.meta["val"].shape)

    def dims(n: fx.Node) -> set[int]:
        return {int(d) % rank for d in n.args[1:3]}

    return inner.args[0] if dims(node) == dims(inner) else None


def _view_of_view(node: fx.Node) -> fx.Node | None:
    """A view of a view looks through the inner one (the outer shape alone counts)."""
    views = {aten.view.default, aten.reshape.default}
    inner = node.args[0]
    if node.target in views and isinstance(inner, fx.Node) and inner.target in views:
        node.args = (inner.args[0], node.args[1])
    return None


_RULES: tuple[Callable[[fx.Node], fx.Node | None], ...] = (
    _identity,
    _view_of_view,
    _same_shape,
    _there_and_back,
    _full_slice,
    _cat_with_nothing,
    _slice_of_cat,
    _transpose_pair,
)
