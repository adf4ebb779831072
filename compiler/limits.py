"""Resolve what the user left open: target, dtype and limits."""

from __future__ import annotations

from typing import Any

from tapeout.compiler.options import BuildOptions
from tapeout.model_defs.architecture import max_positions
from tapeout.plugins.cpu import HostCpu
from tapeout.plugins.errors import UnsupportedError, UsageError
from tapeout.runtime.engine.manifest import Limits

DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_MAX_BATCH_SIZE = {"cpu": 8, "cuda": 64}
DEFAULT_MAX_NUM_TOKENS = {"cpu": 512, "cuda": 2048}
DTYPES = ("float32", "bfloat16")  # on either kind of target


def target_kind(options: BuildOptions) -> str:
    """`cpu` or `cuda`."""
    return "cuda" if options.target.startswith("cuda:") else "cpu"


def resolve_target(options: BuildOptions, host: HostCpu) -> str:
    """`auto` and `cpu` are this machine's CPU level."""
    return options.target if target_kind(options) == "cuda" else f"cpu:{host.level}"


def resolve_dtype(options: BuildOptions, config: Any) -> str:
    """The dtype asked for, or the checkpoint's own, or float32 where the config names none.

    Raises UnsupportedError for a dtype the target cannot compute in.
    """
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    asked = stored if options.dtype == "auto" else options.dtype
    if asked not in DTYPES:
        where = options.target if target_kind(options) == "cuda" else "cpu"
        whose = ", the checkpoint's," if options.dtype == "auto" else ""
        hint = "pass --dtype bfloat16 or --dtype float32"
        if stored == "float16":  # both hold what float16 holds, in range or in digits
            hint = (
                "pass --dtype bfloat16: as small and as fast, weights lose 3 of 11 bits; or --dtype float32: "
                "every weight as it is, in twice the memory"
            )
        raise UnsupportedError(
            f"dtype {asked!r}{whose} is not supported on target {where}, expected one of {', '.join(DTYPES)}",
            hint=hint,
        )
    return asked


def resolve_limits(options: BuildOptions, config: Any) -> Limits:
    """Limits with defaults from the target and the model.

    Raises UsageError, with all offenders, for limits the model or each other do not allow.
    """
    most = max_positions(config)
    kind = target_kind(options)
    batch = options.max_batch_size or DEFAULT_MAX_BATCH_SIZE[kind]
    limits = Limits(
        max_batch_size=batch,
        max_num_tokens=options.max_num_tokens or max(DEFAULT_MAX_NUM_TOKENS[kind], batch),
        max_seq_len=options.max_seq_len or min(most, DEFAULT_MAX_SEQ_LEN),
        tokens_per_page=options.tokens_per_page,
    )
    problems, hints = [], []
    if limits.max_seq_len > most:
        hints.append(f"--max-seq-len is at most {most} for this model")
        problems.append(f"max_seq_len: {limits.max_seq_len} is more than the model's {most} positions")
    if limits.max_num_tokens < limits.max_batch_size:
        hints.append("lower --max-batch-size or raise --max-num-tokens")
        problems.append(
            f"max_num_tokens: {limits.max_num_tokens} is less than max_batch_size {limits.max_batch_size}"
        )
    if problems:
        raise UsageError("\n".join(problems), hint="; ".join(hints))
    return limits
