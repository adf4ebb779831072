"""Who competes on a GPU: for every op signature, kind of step and bucket of rows the tactics worth timing."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tapeout.compiler.cuda_plan import (
    Chosen,
    decode_buckets,
    fitting_tactics,
    suited_tactics,
    usable_tactics,
)
from tapeout.compiler.plan import buckets, max_rows
from tapeout.compiler.tactics.gpu_cases import conditions
from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import NATIVE, CudaTactic, CudaTarget, Launchable, LaunchSpec
from tapeout.plugins.triton_aot.digest import kernel_digest, ptxas_version
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.tactic_timer.pack import DECODE, MIXED


@dataclass(frozen=True)
class Contender:
    """A tactic's launches at a bucket, and the digest of all that decides its speed there."""

    chosen: Chosen
    kernel_hash: str

    @property
    def name(self) -> str:
        return self.chosen.tactic.name

    @property
    def provider(self) -> str:
        return self.chosen.tactic.provider


@dataclass(frozen=True)
class Contest:
    """One decision: which tactic runs an op at one bucket in one kind of step.

    Attributes:
        key: of the signature. kind: `mixed` or `decode`. rows: padded.
        conditions: the engine's limits that shape the steps it is timed in.
        contenders: by the time expected of them, so that the best are timed first.
        rejected: tactics that cannot run the signature, and why.
    """

    key: str
    signature: OpSignature
    kind: str
    rows: int
    conditions: str
    contenders: tuple[Contender, ...]
    rejected: Mapping[str, str]


def contests(
    signatures: Mapping[str, OpSignature],
    limits: Limits,
    target: CudaTarget,
    unfit: Mapping[str, str] = MappingProxyType({}),
    providers: Container[str] = frozenset({NATIVE}),
) -> tuple[Contest, ...]:
    """All decisions of a build, in the order of the signatures, mixed before decode, rows ascending.

    A signature that no tactic can run has none.

    Args:
        unfit: kernels that the target cannot run, and why; who needs one does not compete.
        providers: whose tactics compete.
    """
    found: list[Contest] = []
    for key, signature in signatures.items():
        usable, rejected = usable_tactics(signature, target, False, providers)
        general = [t for t in usable if not t.decode_only]
        kinds = [(MIXED, general, buckets(max_rows(signature.outputs[0].shape, limits)))]
        if len(usable) > len(general):
            kinds.append((DECODE, usable, decode_buckets(limits)))
        for kind, tactics, sizes in kinds:
            for rows in sizes if tactics else ():
                reasons = dict(rejected)
                fitting = fitting_tactics(signature, target, unfit, reasons, tactics, rows)
                contenders = _contenders(signature, fitting, rows, target)
                found.append(
                    Contest(key, signature, kind, rows, conditions(signature, limits), contenders, reasons)
                )
    return tuple(found)


def reference_contender(contest: Contest, target: CudaTarget) -> Contender:
    """The plain tactic others are compared with: of those for any step the first, which works everywhere."""
    usable, _ = usable_tactics(contest.signature, target, False, frozenset({NATIVE}))
    tactic = next(t for t in usable if not t.decode_only)
    return _contender(contest.signature, tactic, contest.rows, target)


def _contenders(
    signature: OpSignature, tactics: list[CudaTactic], rows: int, target: CudaTarget
) -> tuple[Contender, ...]:
    suited = suited_tactics(tactics, rows)
    suited.sort(key=lambda t: t.expected_us(signature, rows, target))
    return tuple(_contender(signature, tactic, rows, target) for tactic in suited)


def _contender(signature: OpSignature, tactic: CudaTactic, rows: int, target: CudaTarget) -> Contender:
    chosen = Chosen(
        rows,
        tactic,
        tactic.launches(signature, rows, target),
        tactic.workspace_bytes(signature, rows, target),
    )
    launches = [_described(item) for item in chosen.launches]
    described = (target.sm, ptxas_version(target.sm), launches, chosen.workspace_bytes)
    return Contender(chosen, hashlib.sha256(repr(described).encode()).hexdigest()[:32])


def _described(item: Launchable) -> tuple[object, ...]:
    arguments = [(a.kind, a.index, a.name, a.value) for a in item.args]
    if isinstance(item, LaunchSpec):
        return kernel_digest(item.kernel), item.grid, arguments
    return item.dtype, item.n, item.k, item.bias, item.addend, arguments
