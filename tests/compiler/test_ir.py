"""The IR's text is the module: it parses back, and anything else is refused with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeout.compiler.ir import Module, Node, Operand, Value, WeightType, contiguous_strides, parse, whole

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}(\.[a-z0-9_]{1,8}){0,3}", fullmatch=True)
DTYPES = st.sampled_from(["float32", "bfloat16", "int8", "int32"])
SIZES = st.lists(st.integers(1, 4096), max_size=3)
ATTRS = st.dictionaries(
    st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True),
    st.one_of(st.booleans(), st.integers(-(10**6), 10**6), st.floats(allow_nan=False), st.text(max_size=12)),
    max_size=4,
)


@st.composite
def operands(draw: st.DrawFn, values: list[Value]) -> Operand:
    """A value, or any window into one."""
    value = draw(st.sampled_from(values))
    if draw(st.booleans()):
        return whole(value)
    shape = (value.shape[0], *draw(SIZES))
    strides = tuple(draw(st.integers(0, 10**6)) for _ in shape)
    return Operand(value.name, shape, strides, draw(st.integers(0, 10**6)))


@st.composite
def modules(draw: st.DrawFn) -> Module:
    symbols = st.sampled_from(["T", "R"])
    inputs = [
        Value(n, "int32", (draw(symbols),))
        for n in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    ]
    weights = {
        n: WeightType(draw(DTYPES), tuple(draw(SIZES)) or (1,)) for n in draw(st.lists(NAMES, max_size=4))
    }
    values, nodes = list(inputs), []
    for _ in range(draw(st.integers(1, 5))):
        outputs = tuple(
            Value(f"%{len(values) + i}", draw(DTYPES), (draw(symbols), *draw(SIZES)))
            for i in range(draw(st.integers(1, 3)))
        )
        nodes.append(
            Node(
                draw(st.from_regex(r"[a-z_]{1,12}", fullmatch=True)),
                tuple(draw(st.lists(operands(values), max_size=3))),
                tuple(draw(st.lists(st.sampled_from(["", *weights]), max_size=3))),
                outputs,
                draw(ATTRS),
            )
        )
        values += outputs
    return Module(tuple(inputs), weights, tuple(nodes), draw(operands(values)))


@settings(max_examples=50)
@given(modules())
def test_text_parses_back(module: Module) -> None:
    assert parse(module.text()) == module
    assert parse(module.text()).digest() == module.digest()


@settings(max_examples=30)
@given(modules(), st.data())
def test_no_line_may_be_missing(module: Module, data: st.DataObject) -> None:
    """A text without one of its lines is refused or is another module."""
    lines = module.text().splitlines()
    index = data.draw(st.integers(0, len(lines) - 1))
    try:
        other = parse("\n".join(lines[:index] + lines[index + 1 :]))
    except ValueError:
        return
    assert other.digest() != module.digest()


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text"])
def test_real_modules_parse_back(family: Callable[..., Any], model_type: str) -> None:
    config = {"lengths": (33, 11), "sliding_window": 8} if model_type == "gemma3_text" else {}
    module = family(model_type, **config).module
    assert parse(module.text()) == module


def test_digest_is_stable() -> None:
    """Engines and caches are told apart by this digest: a change of the text form needs a new IR_VERSION."""
    x, y = Value("token_ids", "int32", ("T",)), Value("%0", "float32", ("T", 8))
    node = Node("embedding", (whole(x),), ("w", ""), (y,), {"b": 1.0, "a": "x, y=1) {"})
    module = Module((x,), {"w": WeightType("float32", (3, 8))}, (node,), Operand("%0", ("T", 4), (8, 1), 4))
    assert module.text() == (
        "tapeout-ir 1\n"
        "input token_ids int32[T]\n"
        "weight w float32[3,8]\n"
        '%0 float32[T,8] = embedding(token_ids; w, -) {a="x, y=1) {", b=1.0}\n'
        "logits %0[T,4|8,1|4]\n"
    )
    assert module.digest() == parse(module.text()).digest()
    assert module.digest() == "af8a7c8b7d99d967990b6cd001d39ef926a3477ebeb36aa0b7aad55383ad82b8"


def test_contiguous_strides() -> None:
    assert contiguous_strides(("T", 4, 16)) == (64, 16, 1)
    assert contiguous_strides(("R",)) == (1,)


GOOD = "tapeout-ir 1\ninput x int32[T]\nweight w float32[3,8]\n%0 float32[T,8] = embedding(x; w)\nlogits %0\n"


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("input x int32[T]", "input x int32", 2, "expected `name dtype"),
        ("input x int32[T]", "input", 2, "expected `name dtype"),
        ("input x int32[T]", "input x int32[T] y", 2, "expected `name dtype"),
        ("input x int32[T]", "input x int32[-1]", 2, "neither sizes nor symbols"),
        ("weight w float32[3,8]", "weight w float32[T,8]", 3, "invalid literal"),
        ("weight w float32[3,8]", "nonsense", 3, "expected `outputs = op"),
        ("embedding(x; w)", "embedding(y; w)", 4, "value 'y' is not defined above"),
        ("embedding(x; w)", "embedding(x; v)", 4, r"weights \['v'\] are not declared"),
        ("embedding(x; w)", "embedding(x x; w)", 4, "expected `value` or"),
        ("embedding(x; w)", "embedding(x; w) {a=}", 4, "Expecting value"),
        ("embedding(x; w)", "embedding(x; w) {a=1 b=2}", 4, "expected `, ` after"),
        ("%0 float32[T,8] =", "x float32[T,8] =", 4, r"\['x'\] are defined already"),
        ("logits %0", "logits %7", 5, "value '%7' is not defined above"),
        ("logits %0", "logits %0[T|1,x]", 5, "invalid literal"),
    ],
)
def test_errors_name_the_line(old: str, new: str, line: int, what: str) -> None:
    parse(GOOD)
    with pytest.raises(ValueError, match=rf"IR line {line} cannot be read: .*{what}"):
        parse(GOOD.replace(old, new))


@pytest.mark.parametrize("text", ["", "tapeout-ir 2\n", GOOD.partition("\n")[2]])
def test_another_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not IR of version 1"):
        parse(text)


def test_logits_must_be_there() -> None:
    with pytest.raises(ValueError, match="no logits line"):
        parse(GOOD.replace("logits %0\n", ""))
