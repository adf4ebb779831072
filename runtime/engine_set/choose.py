"""Which engine of a set a machine runs. One rule, told in full by `choose_engine`."""

from __future__ import annotations

from collections.abc import Sequence

from tapeout.plugins.errors import EngineIncompatibleError, UsageError
from tapeout.runtime.engine.target import CPU_LEVELS, is_model
from tapeout.runtime.engine_set.index import EngineEntry
from tapeout.runtime.engine_set.machine import Machine

#: How well a cuda engine fits a GPU of its compute capability.
_OTHER_MODEL, _GENERIC, _SAME_MODEL = range(3)
_BY_HAND = "choose with --target and --precision (in Python target=, precision=), or name the engine's file"


def has_gpu_engines(entries: Sequence[EngineEntry]) -> bool:
    return any(entry.sm is not None for entry in entries)


def choose_engine(
    entries: Sequence[EngineEntry],
    machine: Machine | None,
    where: str,
    *,
    target: str | None = None,
    precision: str | None = None,
) -> EngineEntry:
    """The engine of a set for a machine.

    1. `target` and `precision` leave only their engines. A whole target (`cuda:h200`, `cuda:sm_90`,
       `cpu:x86_64_v3`) is taken as it is, whatever the machine; `cpu` and `cuda` name a kind.
    2. Of the rest those that the machine can run are left: with a GPU the ones for its compute
       capability, without one the cpu ones. A set of cpu engines alone runs on any machine.
    3. If they are of several precisions, nobody but the user can tell which is wanted.
    4. The GPU's own model wins over a generic `sm_NN`, and that over another model; on CPUs the
       highest level wins; then timed over untimed.

    Args:
        machine: None when `target` names a whole target; nothing else needs to know it.
        where: the set, for messages.

    Raises:
        EngineIncompatibleError: the machine can run none; everything there is is listed.
        UsageError: `target` or `precision` is not there, or several engines fit equally well.
    """
    chosen = asked_for(entries, where, target, precision)
    if machine is not None and (target is None or ":" not in target):
        chosen = _runnable(chosen, entries, machine, where, target)
        precisions = sorted({entry.precision for entry in chosen})
        if len(precisions) > 1:
            raise UsageError(
                f"{where} has engines of {len(precisions)} precisions for {machine.text()}:\n"
                f"{listing(chosen)}",
                hint=f"choose with --precision {' or '.join(precisions)} (in Python precision=), or name the "
                "engine's file",
            )
        chosen = _best(chosen, [_fit(entry, machine) for entry in chosen])
    chosen = _best(chosen, [entry.timed for entry in chosen])
    if len(chosen) > 1:
        raise UsageError(
            f"{where} has {len(chosen)} engines that fit equally well:\n{listing(chosen)}", hint=_BY_HAND
        )
    return chosen[0]


def listing(entries: Sequence[EngineEntry]) -> str:
    """A line for each engine, indented: file, target, precision, limits, timed or not."""
    rows = [
        (
            entry.file,
            entry.target if entry.sku is None else f"{entry.target} (sm_{entry.sm})",
            entry.precision,
            f"batch {entry.limits.max_batch_size}, sequence {entry.limits.max_seq_len}",
            "timed" if entry.timed else "untimed",
        )
        for entry in entries
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  " + "  ".join([*map(str.ljust, row[:4], widths), row[4]]) for row in rows)


def asked_for(
    entries: Sequence[EngineEntry], where: str, target: str | None, precision: str | None
) -> list[EngineEntry]:
    """The engines of a target and a precision, where they are given; UsageError when there are none."""
    chosen = list(entries)
    for name, value in (("target", target), ("precision", precision)):
        if value is None:
            continue
        kept = [entry for entry in chosen if _matches(entry, name, value)]
        if not kept:
            raise UsageError(
                f"{where} has no engine of {name} {value!r}; it has:\n{listing(entries)}",
                hint="give one of these, or build one: tapeout build MODEL --target TARGET",
            )
        chosen = kept
    return chosen


def _matches(entry: EngineEntry, name: str, value: str) -> bool:
    if name == "precision":
        return entry.precision == value.replace("_", "-")
    return entry.target == value if ":" in value else entry.target.startswith(value + ":")


def _runnable(
    chosen: Sequence[EngineEntry],
    entries: Sequence[EngineEntry],
    machine: Machine,
    where: str,
    target: str | None,
) -> list[EngineEntry]:
    kind = target or ("cuda" if machine.gpu is not None and has_gpu_engines(entries) else "cpu")
    fitting = [e for e in chosen if e.target.startswith(kind + ":") and _fit(e, machine) is not None]
    if not fitting:
        raise EngineIncompatibleError(
            f"{where} has no engine for this machine, {machine.text()}; it has:\n{listing(entries)}",
            hint="build one: tapeout build MODEL --target TARGET; --target cpu takes a cpu engine even where "
            "there is a GPU",
        )
    return fitting


def _fit(entry: EngineEntry, machine: Machine) -> int | None:
    """How well the machine suits the engine, more is better; None: it cannot run it."""
    if entry.sm is not None:
        if machine.gpu is None or machine.gpu.sm != entry.sm:
            return None
        if entry.sku is None:
            return _GENERIC
        return _SAME_MODEL if is_model(machine.gpu.name, entry.sku) else _OTHER_MODEL
    level = entry.target.partition(":")[2]
    family = next((f for f in CPU_LEVELS if level in f), ())
    if machine.cpu_level not in family or family.index(machine.cpu_level) < family.index(level):
        return None
    return family.index(level)


def _best(entries: Sequence[EngineEntry], ranks: Sequence[int | None]) -> list[EngineEntry]:
    best = max(rank for rank in ranks if rank is not None)
    return [entry for entry, rank in zip(entries, ranks, strict=True) if rank == best]
