"""The lowered module of a model of SmolLM2-135M's shape, without tracing one."""

from __future__ import annotations

from tapeout.compiler.ir import Module, parse

_NORM = "cast_before_weight=true, eps=9.999999747378752e-06, weight_offset=0.0"
_ATTENTION = (
    "cast_before_weight=false, eps=0.0, interleaved=false, layer={layer}, qk_norm=false, scale=0.125, "
    "softcap=0.0, weight_offset=0.0, window=0"
)


def smollm2_module(dtype: str, *, layers: int, hidden: int = 576, intermediate: int = 1536) -> Module:
    """As `lower` gives it for CUDA targets; the benchmark compares its regions with the real model's."""
    heads, kv_heads, vocab = 9, 3, 49152
    qkv, size = 64 * (heads + 2 * kv_heads), 64
    weights = [f"weight embed {dtype}[{vocab},{hidden}]", f"weight freq float32[{size // 2}]"]
    lines, number = [], 1

    def value(shape: str, call: str) -> str:
        nonlocal number
        number += 1
        lines.append(f"%{number} {dtype}[{shape}] = {call}")
        return f"%{number}"

    stream = "%0"
    lines.append(f"%0 {dtype}[T,{hidden}] = embedding(token_ids; embed)")
    lines.append(f'%1 {dtype}[T,{size}] = rope_table(positions; freq) {{dtype="{dtype}", scaling=1.0}}')
    for layer in range(layers):
        p = f"layers.{layer}"
        weights += [
            f"weight {p}.n1 {dtype}[{hidden}]", f"weight {p}.qkv {dtype}[{qkv},{hidden}]",
            f"weight {p}.o {dtype}[{hidden},{hidden}]", f"weight {p}.n2 {dtype}[{hidden}]",
            f"weight {p}.up {dtype}[{2 * intermediate},{hidden}]",
            f"weight {p}.down {dtype}[{hidden},{intermediate}]",
        ]  # fmt: skip
        product = value(f"T,{qkv}", f'norm_linear({stream}; {p}.n1, {p}.qkv, -) {{activation="", {_NORM}}}')
        q = f"{product}[T,{heads},64|{qkv},64,1]"
        k, v = (f"{product}[T,{kv_heads},64|{qkv},64,1|{at}]" for at in (hidden, hidden + 64 * kv_heads))
        attrs = _ATTENTION.format(layer=layer)
        context = value(f"T,{heads},64", f"rope_attention({q}, {k}, {v}, %1; -, -, -) {{{attrs}}}")
        context, rows = f"{context}[T,{hidden}|{hidden},1]", "T"
        if layer == layers - 1:
            context = value(f"R,{hidden}", f"select_rows({context}, row_ids)")
            stream, rows = value(f"R,{hidden}", f"select_rows({stream}, row_ids)"), "R"
        stream = value(f"{rows},{hidden}", f"linear_add({context}, {stream}; {p}.o, -)")
        gated = value(
            f"{rows},{intermediate}",
            f'norm_linear({stream}; {p}.n2, {p}.up, -) {{activation="silu", {_NORM}}}',
        )
        stream = value(f"{rows},{hidden}", f"linear_add({gated}, {stream}; {p}.down, -)")
    weights.append(f"weight norm {dtype}[{hidden}]")
    logits = value(f"R,{vocab}", f'norm_linear({stream}; norm, embed, -) {{activation="", {_NORM}}}')
    inputs = ["input token_ids int32[T]", "input positions int32[T]", "input row_ids int32[R]"]
    return parse("\n".join(["tapeout-ir 1", *inputs, *weights, *lines, f"logits {logits}"]) + "\n")
