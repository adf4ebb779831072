"""The native toolchain: compiles for every level, the same bytes everywhere, loads, refuses."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tapeout.plugins.cpu import BoundCall, HostCpu
from tapeout.plugins.errors import EngineIncompatibleError, TapeoutError, UnsupportedError
from tapeout.plugins.native import LEVELS, NativeLibrary, compile_native, load_native, source_digest
from tapeout.plugins.native import compile as compile_module
from tapeout.plugins.native.host import parse_host
from tapeout.plugins.registry import cpu_tactics

ELF_MACHINE = {"x86_64_v2": 62, "x86_64_v3": 62, "x86_64_v4": 62, "aarch64": 183}
V3 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_compiles_from_any_machine(level: str) -> None:
    data = compile_native(level)
    assert data[:4] == b"\x7fELF"
    assert int.from_bytes(data[18:20], "little") == ELF_MACHINE[level]


def test_bytes_hold_no_path_and_do_not_depend_on_the_cache(
    host: HostCpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_native(host.level)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    again = compile_native.__wrapped__(host.level)
    assert first == again
    assert str(tmp_path).encode() not in again
    assert str(Path(compile_module.__file__).parents[2]).encode() not in again


def test_digest_names_level_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {source_digest(level) for level in LEVELS}
    assert len(digests) == len(LEVELS)
    monkeypatch.setattr(compile_module, "_FLAGS", (*compile_module._FLAGS, "-DX"))
    assert source_digest(LEVELS[0]) not in digests


def test_unknown_level_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'x86_64_v9' is not one of"):
        compile_native("x86_64_v9")


def test_missing_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="ziglang") as caught:
        source_digest("x86_64_v3")
    assert "tapeout[build]" in (caught.value.hint or "")


def test_compiler_messages_reach_the_user(host: HostCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "_FLAGS", ("-no-such-flag",))
    with pytest.raises(TapeoutError, match="no-such-flag"):
        compile_native.__wrapped__(host.level)


def test_damaged_object_is_refused(kernels: NativeLibrary) -> None:
    with pytest.raises(EngineIncompatibleError, match="cannot be loaded"):
        load_native(b"\x7fELF" + bytes(100))


def test_libraries_do_not_share_state(host: HostCpu) -> None:
    """The dynamic loader knows objects by path: two loads must not get one path."""
    data = compile_native(host.level)
    one, two = load_native(data, threads=1), load_native(data, threads=2)
    addresses = {ctypes.addressof(ctypes.c_char.in_dll(x._handle, "tapeout_linear")) for x in (one, two)}
    assert len(addresses) == 2
    assert load_native(data, threads=1) is one


def test_wrong_argument_block_is_refused(kernels: NativeLibrary) -> None:
    with pytest.raises(EngineIncompatibleError, match="no 'frobnicate'"):
        kernels.bind("frobnicate", 1)
    with pytest.raises(EngineIncompatibleError, match="takes 9 arguments, this tapeout passes 1"):
        kernels.bind("copy", 1)


@pytest.mark.parametrize(
    ("machine", "flags", "level"),
    [
        ("x86_64", V4, "x86_64_v4"),
        ("x86_64", V3, "x86_64_v3"),
        ("x86_64", V3.replace("fma ", ""), "x86_64_v2"),
        ("aarch64", "asimd", "aarch64"),
    ],
)
def test_host_level(machine: str, flags: str, level: str) -> None:
    assert parse_host(machine, f"processor\t: 0\nflags\t\t: {flags}\n", {0}, None).level == level


def test_old_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="none of the instruction sets"):
        parse_host("x86_64", "processor\t: 0\nflags\t: sse2\n", {0}, None)


def test_host_threads_are_physical_cores_allowed() -> None:
    block = "processor\t: {}\nphysical id\t: 0\ncore id\t: {}\nflags\t: " + V3 + "\n"
    text = "\n".join(block.format(i, i // 2) for i in range(8))
    assert parse_host("x86_64", text, set(range(8)), None).threads == 4
    assert parse_host("x86_64", text, {0, 1, 2}, None).threads == 2
    assert parse_host("x86_64", text, set(range(8)), "3").threads == 3
    assert parse_host("x86_64", text, set(range(8)), "garbage").threads == 4


def test_kernels_borrow_the_team_of_torch_and_run_without_one(host: HostCpu, kernels: NativeLibrary) -> None:
    """More work than one thread gets, from a second Python thread and single-threaded: same bits."""
    x, weight = torch.randn(4, 512), torch.randn(2048, 512)
    results = [torch.empty(4, 2048) for _ in range(3)]
    tactic = next(t for t in cpu_tactics("linear") if t.name == "native")

    def run(library: NativeLibrary, out: torch.Tensor) -> None:
        tactic.bind(BoundCall((x,), (weight, None), (out,), {}, None, library))()  # type: ignore[arg-type]

    run(kernels, results[0])
    worker = threading.Thread(target=run, args=(kernels, results[1]))
    worker.start()
    worker.join()
    run(load_native(compile_native(host.level), threads=1), results[2])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[0], x @ weight.t(), rtol=1e-4, atol=1e-4)


def test_libgomp_is_found(kernels: NativeLibrary) -> None:
    from tapeout.plugins.native.library import _team_launcher

    assert ctypes.c_void_p(_team_launcher()).value


def test_registry_and_schemas_do_not_import_torch() -> None:
    code = "import sys, tapeout.plugins.registry, tapeout.plugins.native; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
