"""The GPUs engines can be built for: what a kernel choice needs to know about each.

Figures are the vendor's data sheets' (SM count, memory) and the CUDA programming guide's
(shared memory a block may use, by compute capability).
"""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.plugins.cuda import CudaTarget
from tapeout.plugins.errors import UnsupportedError


@dataclass(frozen=True)
class Sku:
    """A GPU model: compute capability (90 for 9.0), multiprocessors, memory."""

    sm: int
    sm_count: int
    memory_gib: int


SKUS: dict[str, Sku] = {
    "a100": Sku(80, 108, 80),
    "a10": Sku(86, 72, 24),
    "l4": Sku(89, 58, 24),
    "l40s": Sku(89, 142, 48),
    "h100": Sku(90, 132, 80),
    "h200": Sku(90, 132, 141),
    "b200": Sku(100, 148, 180),
    "rtx5090": Sku(120, 170, 32),
}

_SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def cuda_target(target: str) -> CudaTarget:
    """`cuda:<sku>` or `cuda:sm_NN`; a generic SM takes the smallest known GPU of its kind.

    Raises UnsupportedError for a GPU that is not in the table.
    """
    name = target.removeprefix("cuda:")
    smallest_last = sorted(SKUS.values(), key=lambda s: (s.sm, -s.sm_count))
    known = {**SKUS, **{f"sm_{s.sm}": s for s in smallest_last}}
    if name not in known:
        raise UnsupportedError(
            f"target {target!r} is unknown, expected cuda: and one of {', '.join(known)}",
            hint="cuda:sm_NN serves every GPU of that compute capability",
        )
    return CudaTarget(known[name].sm, known[name].sm_count, _SHARED_BYTES[known[name].sm])
