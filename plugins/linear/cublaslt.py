"""The product by cuBLASLt as a tactic of linear, norm_linear and linear_add.

Launches around it are ours: a norm into the workspace before, a gated activation out of it behind.
Bias and residual are the library's to add: into the float32 sum, so that a linear_add is rounded once
where its definition rounds twice, which its tolerance covers.
"""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import CUBLASLT, Arg, CudaTarget, Launchable, LaunchSpec, MatmulSpec
from tapeout.plugins.gated_activation.cuda import TACTICS as GATED
from tapeout.plugins.linear.parts import LinearParts, norm_launches, normed_row_elements
from tapeout.plugins.triton_aot.redirect import to_workspace
from tapeout.plugins.triton_aot.tactic import TritonTactic, ceil_div

#: What an algorithm may take: what cuBLAS gives itself on SM 90 (its documentation, cublasSetWorkspace).
WORKSPACE_BYTES = 32 << 20
_ALIGNED = 256
_EIGHT = 8  # elements: rows of x, weight and out are read and written 16 bytes at once
_BYTES_PER_US, _FLOP_PER_US, _LAUNCH_US = 3.0e6, 5.0e8, 1.5  # of a large device, to rank alone


class CublasLt(TritonTactic):
    """One call; its algorithm is found where the library and the GPU are.

    The workspace holds the normed x, then the product of gates and ups, then the algorithm's own.
    """

    name = "cublaslt"
    provider = CUBLASLT
    batch_invariant = False  # an algorithm is chosen for each bucket
    interpretable = False

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        x = signature.inputs[0]
        if x.dtype != "bfloat16":
            return f"{x.dtype} products are left to our own kernels"
        if len(x.shape) != 2:
            return f"x has shape {list(x.shape)}, expected [T, K]"
        parts = LinearParts.of(signature)
        if parts.k % _EIGHT or parts.n % _EIGHT:
            return f"{parts.n} outputs of depth {parts.k} are no multiples of {_EIGHT}"
        types = {signature.weights[parts.weight].dtype, signature.outputs[0].dtype}
        if parts.bias is not None:
            types.add(signature.weights[parts.bias].dtype)
        if types != {x.dtype}:
            return f"operands of {', '.join(sorted(types))} in one product"
        return super().unsupported(signature, target)

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        parts = LinearParts.of(signature)
        products = parts.weight_rows * parts.k
        launches = 1 + (parts.norm is not None) + bool(parts.activation)
        return max(2 * products / _BYTES_PER_US, 2 * products * rows / _FLOP_PER_US) + _LAUNCH_US * launches

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        return self._places(LinearParts.of(signature), rows)[1] + WORKSPACE_BYTES

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[Launchable, ...]:
        parts = LinearParts.of(signature)
        product_at, own_at = self._places(parts, rows)
        norm: tuple[LaunchSpec, ...] = ()
        x, x_row = Arg("input", 0), Arg("input_stride", 0, value=0)
        if parts.norm is not None:
            norm = norm_launches(signature, rows, target, 0)
            x, x_row = Arg("workspace", value=0), Arg("i32", value=normed_row_elements(parts.k))
        out, out_row = Arg("output", 0), Arg("output_stride", 0, value=0)
        gate: tuple[LaunchSpec, ...] = ()
        if parts.activation:
            out, out_row = Arg("workspace", value=product_at), Arg("i32", value=_row(parts.weight_rows))
            gate = _gate_launches(signature, parts, rows, target, product_at)
        residual = 0 if parts.residual is None else parts.residual
        bias = parts.weight if parts.bias is None else parts.bias
        args = (
            x, x_row, Arg("weight", parts.weight), out, out_row, Arg("input", residual),
            Arg("input_stride", residual, value=0), Arg("weight", bias), Arg("workspace", value=own_at),
        )  # fmt: skip
        product = MatmulSpec(
            parts.dtype,
            n=parts.weight_rows,
            k=parts.k,
            bias=parts.bias is not None,
            addend=parts.residual is not None,
            args=args,
            workspace_bytes=WORKSPACE_BYTES,
        )
        return *norm, product, *gate

    def _places(self, parts: LinearParts, rows: int) -> tuple[int, int]:
        """Where the product of gates and ups and the algorithm's workspace start."""
        normed = 2 * rows * normed_row_elements(parts.k) if parts.norm is not None else 0
        product_at = ceil_div(normed, _ALIGNED) * _ALIGNED
        product = 2 * rows * _row(parts.weight_rows) if parts.activation else 0
        return product_at, product_at + ceil_div(product, _ALIGNED) * _ALIGNED


def _row(elements: int) -> int:
    return ceil_div(elements, 16) * 16


def _gate_launches(
    signature: OpSignature, parts: LinearParts, rows: int, target: CudaTarget, at: int
) -> tuple[LaunchSpec, ...]:
    """gated_activation of gates and ups in the workspace."""
    out = signature.outputs[0]
    both = TensorType(out.dtype, (out.shape[0], parts.weight_rows))
    gated = OpSignature("gated_activation", (both,), (), (out,), {"activation": parts.activation})
    launches = GATED[0].launches(gated, rows, target)
    return tuple(
        to_workspace(item, "input", 0, at, (_row(parts.weight_rows),))
        for item in launches
        if isinstance(item, LaunchSpec)
    )
