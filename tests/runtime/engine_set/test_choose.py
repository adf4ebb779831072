"""Which engine of a set a machine runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from tapeout.plugins.errors import EngineIncompatibleError, UsageError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.target import GpuFacts
from tapeout.runtime.engine_set import EngineEntry
from tapeout.runtime.engine_set.choose import choose_engine
from tapeout.runtime.engine_set.machine import Machine

LIMITS = Limits(max_batch_size=8, max_num_tokens=64, max_seq_len=128, tokens_per_page=16)


def entry(target: str, sm: int | None = None, *, file: str | None = None, **changes: object) -> EngineEntry:
    kind, _, name = target.partition(":")
    generic = kind == "cpu" or name.startswith("sm_")
    made = EngineEntry(
        file=file or f"{name}.engine",
        target=target,
        sku=None if generic else name,
        sm=sm,
        dtype="bfloat16",
        quantize="none",
        limits=LIMITS,
        timed=True,
        size_bytes=1,
        sha256="",
        content_key="key",
        weights=(),
        versions={},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def gpu(name: str, sm: int) -> Machine:
    return Machine(GpuFacts(name, sm, 132, 141 << 30, 13000), "x86_64_v4")


H200, H100, SM_90 = entry("cuda:h200", 90), entry("cuda:h100", 90), entry("cuda:sm_90", 90)
L4, V2, V3 = entry("cuda:l4", 89), entry("cpu:x86_64_v2"), entry("cpu:x86_64_v3")
ALL = (H200, H100, SM_90, L4, V2, V3)
THIS_H200, THIS_CPU = gpu("NVIDIA H200", 90), Machine(None, "x86_64_v4", "no driver")


def chosen(entries: tuple[EngineEntry, ...], machine: Machine | None, **asked: str) -> EngineEntry:
    """The choice, which must not depend on the order of the entries."""
    (found,) = {
        choose_engine(order, machine, "sets/m", **asked).file for order in list(permutations(entries))[:24]
    }
    return next(e for e in entries if e.file == found)


@pytest.mark.parametrize(
    ("entries", "machine", "expected"),
    [
        (ALL, THIS_H200, H200),
        (ALL, gpu("NVIDIA H100 80GB HBM3", 90), H100),
        (ALL, gpu("NVIDIA GH200 480GB", 90), SM_90),  # of sm_90, but neither model
        (ALL, gpu("NVIDIA H200 MIG 1g.18gb", 90), SM_90),  # a slice is no model
        (ALL, gpu("NVIDIA L4", 89), L4),
        (ALL, gpu("NVIDIA L40S", 89), L4),  # another model of its capability is better than nothing
        (ALL, THIS_CPU, V3),
        (ALL, Machine(None, "x86_64_v2"), V2),
        ((V2, V3), THIS_H200, V3),  # a set without engines for GPUs
        ((replace(SM_90, timed=True), replace(H200, timed=False)), THIS_H200, replace(H200, timed=False)),
        ((SM_90, replace(SM_90, file="untimed.engine", timed=False)), THIS_H200, SM_90),
        ((V3, replace(V3, file="untimed.engine", timed=False)), THIS_CPU, V3),
    ],
)
def test_the_engine_for_a_machine(
    entries: tuple[EngineEntry, ...], machine: Machine, expected: EngineEntry
) -> None:
    assert chosen(entries, machine) == expected


@pytest.mark.parametrize(
    ("entries", "machine", "words"),
    [
        (ALL, gpu("NVIDIA B200", 100), "NVIDIA B200 (sm_100), cpu:x86_64_v4"),
        ((H200, L4), THIS_CPU, "cpu:x86_64_v4, no GPU (no driver)"),
        (ALL, Machine(None, "aarch64"), "cpu:aarch64, no GPU"),
        ((V3,), Machine(None, "x86_64_v2"), "cpu:x86_64_v2, no GPU"),
        ((V3,), Machine(None, None), "a CPU without kernels, no GPU"),
    ],
)
def test_a_machine_that_can_run_none_is_told_what_there_is(
    entries: tuple[EngineEntry, ...], machine: Machine, words: str
) -> None:
    with pytest.raises(EngineIncompatibleError) as raised:
        choose_engine(entries, machine, "sets/m")
    first, *lines = raised.value.message.splitlines()
    assert first == f"sets/m has no engine for this machine, {words}; it has:"
    assert [line.split()[:2] for line in lines] == [[e.file, e.target] for e in entries]
    assert raised.value.hint


@pytest.mark.parametrize("machine", [THIS_H200, gpu("NVIDIA L4", 89), THIS_CPU, None])
@pytest.mark.parametrize("target", ["cuda:h100", "cuda:l4", "cuda:sm_90", "cpu:x86_64_v2"])
def test_a_whole_target_is_taken_whatever_the_machine(machine: Machine | None, target: str) -> None:
    assert chosen(ALL, machine, target=target).target == target


def test_a_kind_is_chosen_and_the_machine_decides_within_it() -> None:
    assert chosen(ALL, THIS_H200, target="cpu") == V3
    assert chosen(ALL, THIS_H200, target="cuda") == H200
    with pytest.raises(EngineIncompatibleError, match="no GPU"):
        choose_engine(ALL, THIS_CPU, "sets/m", target="cuda")


def test_several_precisions_are_for_the_user_to_choose() -> None:
    int8 = replace(V3, file="int8.engine", quantize="int8-dynamic")
    generic_int8 = replace(SM_90, file="int8.engine", quantize="int8-dynamic")
    for entries, machine in (((V3, int8), THIS_CPU), ((H200, generic_int8), THIS_H200)):
        with pytest.raises(UsageError, match="engines of 2 precisions") as raised:
            choose_engine(entries, machine, "sets/m")
        assert raised.value.hint is not None
        assert "--precision bfloat16 or int8-dynamic" in raised.value.hint
        assert chosen(entries, machine, precision="bfloat16") == entries[0]
        assert chosen(entries, machine, precision="int8_dynamic") == entries[1]
    # Precisions that this machine cannot run are no reason to ask.
    assert chosen((V3, replace(L4, quantize="int8-dynamic")), THIS_CPU) == V3


def test_engines_that_fit_equally_well_are_named() -> None:
    longer = replace(H200, file="h200-long.engine", limits=replace(LIMITS, max_seq_len=4096))
    for asked in ({}, {"target": "cuda:h200"}):
        with pytest.raises(UsageError, match="2 engines that fit equally well") as raised:
            choose_engine((H200, longer, L4), THIS_H200, "sets/m", **asked)
        assert raised.value.message.splitlines()[1:] == [
            "  h200.engine       cuda:h200 (sm_90)  bfloat16  batch 8, sequence 128   timed",
            "  h200-long.engine  cuda:h200 (sm_90)  bfloat16  batch 8, sequence 4096  timed",
        ]


@pytest.mark.parametrize("asked", [{"target": "cuda:b200"}, {"target": "rocm"}, {"precision": "float8"}])
def test_what_is_not_there_is_refused_with_what_is(asked: dict[str, str]) -> None:
    ((name, value),) = asked.items()
    with pytest.raises(UsageError) as raised:
        choose_engine(ALL, THIS_CPU, "sets/m", **asked)
    first, *lines = raised.value.message.splitlines()
    assert first == f"sets/m has no engine of {name} '{value}'; it has:"
    assert len(lines) == len(ALL)
