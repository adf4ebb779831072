"""What an op is timed with on a GPU: contents of its operands, and the steps it is checked and timed in."""

from __future__ import annotations

import math

from tapeout.plugins.case import cache_tolerance, tolerance
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import CudaTarget
from tapeout.plugins.registry import OPS
from tapeout.plugins.tactic_check.hashed import factor_of, seed_of
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.kv_cache import pages_for
from tapeout.runtime.tactic_timer.pack import DECODE, Cache, Content, Operand, Output, StepCase

CACHED_TOKENS = 1024  # of a sequence that generates, about the mean
_LONGEST_CHECKED = 512  # rows of a prompt in a step of checking: torch follows on a CPU
_LONGEST_PROMPT = 1024  # in a step of timing
_DECODE_SHARE = 4  # in a mixed step of timing one row in so many generates
_PADDING = 3  # rows of a bucket that a step of checking leaves empty
#: (query rows, cache length after) that steps of checking begin with: prefill, a later chunk, decode.
_CHECKED = ((33, 33), (1, 50), (20, 83), (1, 1), (3, 100), (1, 129), (70, 70), (1, 260))
_ROPE_BASE = 10000.0


def weight_names(signature: OpSignature) -> list[str]:
    """Names of the weights a signature has, in its order."""
    schema = OPS[signature.op]
    placed = schema.place_weights(signature.weights, signature.attrs)
    names = (name.rstrip("?") for name in schema.weights)
    return [name for name, weight in zip(names, placed, strict=True) if weight is not None]


def input_names(signature: OpSignature) -> list[str]:
    return [name.rstrip("?") for name in OPS[signature.op].inputs[: len(signature.inputs)]]


def operands(
    signature: OpSignature, step: StepCase, stored: dict[str, int]
) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """(inputs, weights) with their contents.

    Args:
        step: of checking; integers stay below what it holds.
        stored: where the numbers of an operand begin in the pack, by its name.
    """
    gathered = int(signature.weights[0].shape[0]) if signature.weights else 1  # rows of a table, or experts
    limits = {"token_ids": gathered, "row_ids": step.rows, "expert_ids": gathered}

    def made(name: str, kind: TensorType) -> Operand:
        seed = seed_of(f"{signature.key()} {name}")
        if name == "positions":
            return Operand(kind.dtype, kind.shape, Content("step", name="positions"))
        if name in limits:
            return Operand(kind.dtype, kind.shape, Content("integers", seed, high=limits[name]))
        if name in stored:
            return Operand(kind.dtype, kind.shape, Content("stored", start=stored[name]))
        deviation = int(kind.shape[-1]) ** -0.5 if name in OPS[signature.op].matrices else 1.0
        return Operand(kind.dtype, kind.shape, Content("normal", seed, factor=factor_of(deviation)))

    inputs = tuple(map(made, input_names(signature), signature.inputs))
    return inputs, tuple(map(made, weight_names(signature), signature.weights))


def stored_values(signature: OpSignature) -> dict[str, list[float]]:
    """Operands whose numbers must be special, in float32: the frequencies of rotations."""
    found = {}
    for name, kind in zip(weight_names(signature), signature.weights, strict=True):
        if name == "inv_freq":
            count = int(kind.shape[0])
            found[name] = [_ROPE_BASE ** (-i / count) for i in range(count)]
    return found


def outputs(signature: OpSignature) -> tuple[Output, ...]:
    """Results with the op's tolerances."""
    limits = [tolerance(signature.op, kind.dtype) for kind in signature.outputs]
    names = OPS[signature.op].outputs
    return tuple(
        Output(name, kind.dtype, kind.shape, limit.absolute, limit.relative)
        for name, kind, limit in zip(names, signature.outputs, limits, strict=True)
    )


def cache_of(signature: OpSignature, target: CudaTarget) -> Cache | None:
    """The KV pool of an op that reads one."""
    if not OPS[signature.op].reads_cache:
        return None
    kv_heads, head_dim = OPS[signature.op].cache_shape([t.shape for t in signature.inputs])
    dtype = target.kv_dtype or signature.inputs[1].dtype
    limit = cache_tolerance(signature.op, dtype)
    return Cache(
        dtype, kv_heads, head_dim, target.tokens_per_page,
        seed_of(f"{signature.key()} cache"), factor_of(1.0), limit.absolute, limit.relative,
    )  # fmt: skip


def conditions(signature: OpSignature, limits: Limits) -> str:
    """The limits that shape the steps of an op; "" where none does."""
    if not OPS[signature.op].reads_cache:
        return ""
    return (
        f"batch {limits.max_batch_size}, length {limits.max_seq_len}, page {limits.tokens_per_page}, "
        f"cached {CACHED_TOKENS}"
    )


def checking_step(signature: OpSignature, kind: str, rows: int, limits: Limits) -> StepCase:
    """A step of nearly `rows` rows, uneven on purpose, that torch can follow."""
    real = max(1, rows - _PADDING)
    if not OPS[signature.op].reads_cache:
        return _plain(signature, real)
    most = limits.max_seq_len
    if kind == DECODE:
        lengths = [kv for _, kv in _CHECKED]
        sequences = [(1, min(most, lengths[i % len(lengths)] + i // len(lengths))) for i in range(real)]
        return _step(sequences, limits)
    sequences = []
    while real > 0 and len(sequences) < limits.max_batch_size:
        free = limits.max_batch_size - len(sequences)
        q, kv = _CHECKED[len(sequences) % len(_CHECKED)]
        if real > free * 16:  # few sequences must take many rows
            q = kv = min(_LONGEST_CHECKED, math.ceil(real / free) + 16)
        q = min(q, real, most)
        sequences.append((q, min(most, max(kv, q))))
        real -= q
    return _step(sequences, limits)


def timing_step(signature: OpSignature, kind: str, rows: int, limits: Limits) -> StepCase:
    """A full bucket as a busy engine fills it: generation over caches of many lengths, and prompts."""
    if not OPS[signature.op].reads_cache:
        return _plain(signature, rows)
    decode = rows if kind == DECODE else min(limits.max_batch_size - 1, rows // _DECODE_SHARE)
    mean, most = min(CACHED_TOKENS, limits.max_seq_len), limits.max_seq_len
    # From half to one and a half times the mean, in an order without a trend; alone, the mean.
    sequences = [
        (1, mean if decode == 1 else max(1, min(most, mean // 2 + mean * (i * 7 % 16) // 15)))
        for i in range(decode)
    ]
    left = rows - decode
    while left > 0:
        free = max(1, limits.max_batch_size - len(sequences))
        q = min(left, most, max(_LONGEST_PROMPT, math.ceil(left / free)))
        # A short piece is the end of a longer prompt.
        sequences.append((q, q if q >= _LONGEST_PROMPT // 4 else max(q, mean)))
        left -= q
    return _step(sequences, limits)


def region_steps(rows: int, logit_rows: int) -> tuple[StepCase, StepCase]:
    """The steps that a region is checked and timed in: nearly full, and full."""
    real = max(1, rows - _PADDING)
    few = logit_rows if logit_rows < rows else real  # as many as there are rows in steps that only decode
    return plain_step(real, min(real, few)), plain_step(rows, logit_rows)


def plain_step(rows: int, logit_rows: int) -> StepCase:
    """For ops that know nothing of sequences: one that is past its beginning, so that positions are large."""
    return StepCase(rows, logit_rows, 1, ((rows, rows + 777),))


def _plain(signature: OpSignature, real: int) -> StepCase:
    if signature.outputs[0].shape[0] == "R":
        return plain_step(3 * real, real)
    return plain_step(real, 1)


def _step(sequences: list[tuple[int, int]], limits: Limits) -> StepCase:
    longest = max(limits.max_seq_len, *(kv for _, kv in sequences))
    pages = pages_for(longest, limits.tokens_per_page)
    return StepCase(sum(q for q, _ in sequences), len(sequences), pages, tuple(sequences))
