"""Patterns made from decompositions: what they find, what they capture, what they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from tapeout.compiler.match import Match, example, find, make_pattern
from tapeout.compiler.passes.canonicalize import canonicalize_nodes

SHAPE = (2, 8)


def graph_of(function: Callable[..., Any], inputs: int = 3) -> fx.Graph:
    """The canonical graph of a function of tensors [2, 8]."""

    class Module(nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args)

    examples = tuple(example(SHAPE, torch.float32) for _ in range(inputs))
    graph = torch.export.export(Module(), examples, strict=False).graph_module.graph
    canonicalize_nodes(graph)
    return graph


def matches(
    pattern: Callable[..., Any], have: Callable[..., Any], inputs: int = 3, **literals: float
) -> list[Match]:
    count = pattern.__code__.co_argcount - len(literals)
    made = make_pattern(pattern, [example(SHAPE, torch.float32) for _ in range(count)], literals)
    return list(find(graph_of(have, inputs), made))


def bound(match: Match) -> list[str]:
    return [n.name for n in match.inputs]


def fused(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    return (a * torch.sigmoid(b),)


@pytest.mark.parametrize("have", [lambda x, y, z: x * torch.sigmoid(y), lambda x, y, z: torch.sigmoid(y) * x])
def test_products_and_sums_match_in_either_order(have: Callable[..., Any]) -> None:
    (match,) = matches(fused, have)
    assert bound(match) == ["args_0", "args_1"]


def test_differences_do_not() -> None:
    def minus(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        return (a - torch.sigmoid(b),)

    assert len(matches(minus, lambda x, y, z: x - torch.sigmoid(y))) == 1
    assert matches(minus, lambda x, y, z: torch.sigmoid(y) - x) == []


def test_nested_commutative_calls_try_both_orders() -> None:
    def pattern(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        return (a.cos() * b.sin() + a.sin() * b.cos(),)

    (match,) = matches(pattern, lambda x, y, z: y.cos() * x.sin() + y.sin() * x.cos())
    assert bound(match) == ["args_1", "args_0"]


def test_an_input_used_twice_must_be_one_value() -> None:
    def square_plus(a: torch.Tensor) -> tuple[torch.Tensor]:
        return (a.exp() + a,)

    (match,) = matches(square_plus, lambda x, y, z: x.exp() + x)
    assert bound(match) == ["args_0"]
    assert matches(square_plus, lambda x, y, z: x.exp() + y) == []


def test_numbers_are_captured() -> None:
    def pattern(a: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
        return ((a + eps).rsqrt(),)

    (match,) = matches(pattern, lambda x, y, z: (x + 1e-6).rsqrt(), eps=1.2345e-5)
    assert match.literals == {"eps": 1e-6}


def test_a_number_used_twice_must_be_one_number() -> None:
    def pattern(a: torch.Tensor, n: int) -> tuple[torch.Tensor]:
        return (torch.cat((a[:, n:], a[:, :n]), dim=-1),)

    (match,) = matches(pattern, lambda x, y, z: torch.cat((x[:, 3:], x[:, :3]), dim=-1), n=5)
    assert match.literals == {"n": 3}
    assert matches(pattern, lambda x, y, z: torch.cat((x[:, 3:], x[:, :4]), dim=-1), n=5) == []


def test_numbers_that_are_no_literals_must_be_equal() -> None:
    def pattern(a: torch.Tensor) -> tuple[torch.Tensor]:
        return ((a + 2.0).rsqrt(),)

    assert len(matches(pattern, lambda x, y, z: (x + 2.0).rsqrt())) == 1
    assert matches(pattern, lambda x, y, z: (x + 3.0).rsqrt()) == []


def test_keyword_arguments_must_be_equal() -> None:
    def pattern(a: torch.Tensor) -> tuple[torch.Tensor]:
        return (nn.functional.gelu(a, approximate="tanh"),)

    assert len(matches(pattern, lambda x, y, z: nn.functional.gelu(x, approximate="tanh"))) == 1
    assert matches(pattern, lambda x, y, z: nn.functional.gelu(x)) == []


def test_all_matches_come_in_graph_order() -> None:
    found = matches(fused, lambda x, y, z: (x * y.sigmoid(), z.sigmoid() * x, x * z))
    assert [bound(m) for m in found] == [["args_0", "args_1"], ["args_0", "args_2"]]


def test_what_was_replaced_meanwhile_is_skipped() -> None:
    graph = graph_of(lambda x, y, z: (x.exp().exp().exp(),))

    def twice(a: torch.Tensor) -> tuple[torch.Tensor]:
        return (a.exp().exp(),)

    pattern = make_pattern(twice, [example(SHAPE, torch.float32)], {})
    seen = 0
    for match in find(graph, pattern):
        seen += 1
        match.outputs[0].replace_all_uses_with(match.inputs[0])
        graph.erase_node(match.outputs[0])
    assert seen == 1  # the overlapping pair lost its users


def test_sentinels_must_differ() -> None:
    def pattern(a: torch.Tensor, m: float, n: float) -> tuple[torch.Tensor]:
        return (a * m + n,)

    with pytest.raises(ValueError, match="sentinels of pattern are not distinct"):
        make_pattern(pattern, [example(SHAPE, torch.float32)], {"m": 3.5, "n": 3.5})
