"""What the tactics of rope_attention read off its signature."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg
from tapeout.plugins.triton_aot.tactic import Argument, pointer, strides

_ATTENTION_ATTRS = ("layer", "scale", "window", "softcap")


def attention_of(signature: OpSignature) -> OpSignature:
    """The paged_attention inside."""
    weights = signature.weights[2:] if signature.attrs["qk_norm"] else signature.weights
    attrs = {n: signature.attrs[n] for n in _ATTENTION_ATTRS if n in signature.attrs} | {"alibi": False}
    return OpSignature("paged_attention", signature.inputs[:3], weights, signature.outputs, attrs)


def partly_turned(signature: OpSignature) -> str | None:
    """Why kernels that turn whole heads cannot run the signature."""
    dim, turned = int(signature.inputs[0].shape[2]), int(signature.inputs[3].shape[1])
    return None if dim == turned else f"turns {turned} of {dim} elements of a head, expected all"


def head_arguments(signature: OpSignature) -> dict[str, Argument]:
    """Arguments by name: queries, keys and values, their norms and the table of angles."""
    q, k, v, table = signature.inputs
    qk_norm = bool(signature.attrs["qk_norm"])
    gain_dtype = signature.weights[0].dtype if qk_norm else q.dtype  # absent: never read
    arguments = [
        *(pointer(n, t.dtype, Arg("input", i)) for i, (n, t) in enumerate((("q", q), ("k", k), ("v", v)))),
        *(
            pointer(f"{n}_norm", gain_dtype, Arg("weight" if qk_norm else "input", i))
            for i, n in enumerate(("q", "k"))
        ),
        pointer("table", table.dtype, Arg("input", 3)),
        Argument("eps", "fp32", Arg("f32", value=float(signature.attrs["eps"]))),
        Argument("weight_offset", "fp32", Arg("f32", value=float(signature.attrs["weight_offset"]))),
        *strides("q", q, "input", 0), *strides("k", k, "input", 1), *strides("v", v, "input", 2),
        Argument("table_row", "i32", Arg("input_stride", 3, value=0)),
    ]  # fmt: skip
    return {a.name: a for a in arguments}


def norm_constants(signature: OpSignature) -> dict[str, bool]:
    """What kernels must know of the norms."""
    return {
        "QK_NORM": bool(signature.attrs["qk_norm"]),
        "CAST_FIRST": bool(signature.attrs["cast_before_weight"]),
        "HAS_OFFSET": float(signature.attrs["weight_offset"]) != 0,
    }
