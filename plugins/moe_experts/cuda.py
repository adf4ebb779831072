"""CUDA tactics of moe_experts."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.triton_aot.elementwise_tactic import block_of
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    TritonTactic,
    ceil_div,
    launch,
    pointer,
    step,
    workspace,
)

_SORT_BLOCK = 1024
_ALIGN = 256  # bytes, of the parts of the workspace


class GroupedExperts(TritonTactic):
    """Assignments sorted by expert, then grouped products over tiles of `rows` assignments.

    The workspace holds starts [E + 1] and order [T K] as int32, inner [T K, I] and parts [T K, H].
    """

    op = "moe_experts"

    def __init__(self, rows: int, columns: int, depth: int) -> None:
        super().__init__()
        self._rows, self._columns, self._depth = rows, columns, depth
        self.name = f"grouped_{rows}x{columns}x{depth}"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        x, ids, weights = signature.inputs
        if ids.dtype != "int32" or weights.dtype != "float32":
            return f"expert ids are {ids.dtype} and weights {weights.dtype}, expected int32 and float32"
        if {w.dtype for w in signature.weights} != {x.dtype}:
            return "weights have another dtype than x"
        return super().unsupported(signature, target)

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        return self._places(signature, rows)[-1]

    def _places(self, signature: OpSignature, rows: int) -> tuple[int, int, int, int, int]:
        """Offsets in bytes of starts, order, inner and parts, and the size of all."""
        experts, hidden, inner = (int(d) for d in signature.weights[1].shape)
        count, size = (
            rows * int(signature.inputs[1].shape[1]),
            4 if signature.inputs[0].dtype == "float32" else 2,
        )
        places, at = [], 0
        for nbytes in (4 * (experts + 1), 4 * count, count * _padded(inner) * size, count * hidden * size):
            places.append(at)
            at += ceil_div(nbytes, _ALIGN) * _ALIGN
        return places[0], places[1], places[2], places[3], at

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        x, ids, _ = signature.inputs
        experts, hidden, inner = (int(d) for d in signature.weights[1].shape)
        chosen, attrs = int(ids.shape[1]), signature.attrs
        starts_at, order_at, inner_at, parts_at, _ = self._places(signature, rows)
        starts, order = workspace("starts", "int32", starts_at), workspace("order", "int32", order_at)
        between, parts = workspace("inner", x.dtype, inner_at), workspace("parts", x.dtype, parts_at)
        has_bias = bool(attrs["has_bias"])
        biases = [pointer("bias", x.dtype, Arg("weight", 2 + i if has_bias else i)) for i in range(2)]
        tile = {"BLOCK_M": self._rows, "BLOCK_N": self._columns, "BLOCK_K": self._depth}
        sizes = {"HIDDEN": hidden, "INNER": inner, "INNER_ROW": _padded(inner), "HAS_BIAS": has_bias}
        block, warps = block_of(hidden)

        def grid(columns: int) -> tuple[GridDim, GridDim, GridDim]:
            return GridDim(0, experts), GridDim(self._rows), GridDim(0, ceil_div(columns, self._columns))

        sort = launch(
            "moe_experts.triton:sort_assignments",
            [
                pointer("ids", "int32", Arg("input", 1)),
                starts,
                order,
                step("counts"),
                _row("ids", "input", 1),
            ],
            {"CHOSEN": chosen, "EXPERTS": experts, "BLOCK": _SORT_BLOCK},
            (GridDim(0, experts),),
        )
        up = launch(
            "moe_experts.triton:project_up",
            [
                pointer("x", x.dtype, Arg("input", 0)), pointer("up", x.dtype, Arg("weight", 0)), biases[0],
                starts, order, between, step("counts"),
                Argument("alpha", "fp32", Arg("f32", value=float(attrs["alpha"]))),
                Argument("limit", "fp32", Arg("f32", value=float(attrs["limit"]))),
                _row("x", "input", 0),
            ],
            {
                "CHOSEN": chosen, **sizes, "ACTIVATION": str(attrs["activation"]),
                "GATED": bool(attrs["gated"]), **tile,
            },
            grid(inner),
        )  # fmt: skip
        down = launch(
            "moe_experts.triton:project_down",
            [
                pointer("down", x.dtype, Arg("weight", 1)),
                biases[1],
                starts,
                order,
                between,
                parts,
                step("counts"),
            ],
            {**sizes, **tile},
            grid(hidden),
        )
        operands = [
            parts,
            pointer("weights", "float32", Arg("input", 2)),
            pointer("out", x.dtype, Arg("output", 0)),
            step("counts"),
            _row("weights", "input", 2),
            _row("out", "output", 0),
        ]
        total = launch(
            "moe_experts.triton:sum_parts",
            operands,
            {"CHOSEN": chosen, "HIDDEN": hidden, "BLOCK": block},
            (GridDim(1), GridDim(0, ceil_div(hidden, block))),
            warps,
        )
        return sort, up, down, total


def _padded(inner: int) -> int:
    return ceil_div(inner, 16) * 16


def _row(name: str, role: str, index: int) -> Argument:
    return Argument(f"{name}_row", "i32", Arg(f"{role}_stride", index, value=0))


TACTICS: tuple[CudaTactic, ...] = (GroupedExperts(16, 64, 64), GroupedExperts(64, 64, 64))
