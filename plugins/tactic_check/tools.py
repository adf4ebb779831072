"""How the kernels of triton.py are called: argument types in order, and what is compiled of each.

A pack stores them under `name` or `name.dtype`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tapeout.plugins.cuda import KernelSpec

BLOCK = 1024

#: Arguments in order with Triton's types; "*" is a pointer to the tool's element type.
ARGUMENTS: dict[str, tuple[tuple[str, str], ...]] = {
    "fill_normal": (
        ("out", "*"), ("columns", "i32"), ("row_stride", "i64"), ("blocks", "i32"), ("seed", "i32"),
        ("scale", "fp32"),
    ),
    "fill_integers": (
        ("out", "*i32"), ("columns", "i32"), ("row_stride", "i64"), ("blocks", "i32"), ("seed", "i32"),
        ("high", "i32"),
    ),
    "fill_cache": (
        ("pool", "*"), ("used", "*i32"), ("heads2", "i32"), ("page_elements", "i32"), ("dim", "i32"),
        ("blocks", "i32"), ("layers", "i32"), ("layer", "i32"), ("seed", "i32"), ("scale", "fp32"),
    ),
    "compare": (
        ("got", "*"), ("wanted", "*"), ("result", "*i32"), ("rows", "i32"), ("columns", "i32"),
        ("row_stride", "i64"), ("blocks", "i32"), ("absolute", "fp32"), ("relative", "fp32"),
    ),
    "compare_cache": (
        ("got", "*"), ("wanted", "*"), ("result", "*i32"), ("elements", "i64"), ("absolute", "fp32"),
        ("relative", "fp32"),
    ),
}  # fmt: skip

_TRITON_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32"}


def tool_name(function: str, dtype: str = "") -> str:
    """The name of a tool in a pack; `dtype` for those that are compiled for an element type."""
    generic = any(kind == "*" for _, kind in ARGUMENTS[function])
    return f"{function}.{dtype}" if generic else function


def tool_specs(dtypes: Iterable[str]) -> Iterator[tuple[str, KernelSpec]]:
    """Every tool by name, for operands of the floating-point types `dtypes`; integers are only compared."""
    floats = sorted(set(dtypes))
    for function, arguments in ARGUMENTS.items():
        generic = any(kind == "*" for _, kind in arguments)
        integers = ["int32"] if function == "compare" else []
        for dtype in (*floats, *integers) if generic else ("",):
            element = _TRITON_TYPES.get(dtype, "")
            signature = tuple((name, f"*{element}" if kind == "*" else kind) for name, kind in arguments)
            yield (
                tool_name(function, dtype),
                KernelSpec("tapeout.plugins.tactic_check.triton", function, signature, {"BLOCK": BLOCK}),
            )
