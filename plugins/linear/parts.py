"""What a product of the linear family is made of, read off an op signature.

`linear`, `norm_linear` and `linear_add` run on the same kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import CudaTarget, LaunchSpec
from tapeout.plugins.rms_norm.cuda import RmsNorm
from tapeout.plugins.triton_aot.redirect import to_workspace


@dataclass(frozen=True)
class LinearParts:
    """Operands by their index in the signature; None: absent.

    Attributes:
        n: outputs. k: depth. weight_rows: N of the weight, 2 n with an activation.
        activation: of a gated pair, or "".
    """

    dtype: str
    n: int
    k: int
    weight_rows: int
    weight: int
    bias: int | None
    residual: int | None = None
    norm: int | None = None
    activation: str = ""

    @classmethod
    def of(cls, signature: OpSignature) -> LinearParts:
        first = 1 if signature.op == "norm_linear" else 0
        rows, k = (int(d) for d in signature.weights[first].shape)
        activation = str(signature.attrs.get("activation", ""))
        return cls(
            dtype=signature.inputs[0].dtype,
            n=rows // 2 if activation else rows,
            k=k,
            weight_rows=rows,
            weight=first,
            bias=first + 1 if len(signature.weights) > first + 1 else None,
            residual=1 if signature.op == "linear_add" else None,
            norm=0 if first else None,
            activation=activation,
        )


def normed_row_elements(k: int) -> int:
    """Elements from row to row of a normed x in the workspace."""
    return -(-k // 16) * 16


def norm_launches(
    signature: OpSignature, rows: int, target: CudaTarget, offset_bytes: int
) -> tuple[LaunchSpec, ...]:
    """rms_norm of a norm_linear's x into its workspace, rows `normed_row_elements` apart."""
    x, gain = signature.inputs[0], signature.weights[0]
    out = TensorType(x.dtype, x.shape)
    names = ("eps", "weight_offset", "cast_before_weight")
    norm = OpSignature("rms_norm", (x,), (gain,), (out,), {n: signature.attrs[n] for n in names})
    stride = normed_row_elements(int(x.shape[-1]))
    launches = RmsNorm("rms_norm").launches(norm, rows, target)
    return tuple(to_workspace(item, "output", 0, offset_bytes, (stride,)) for item in launches)
