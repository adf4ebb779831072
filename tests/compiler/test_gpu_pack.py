"""What is in a pack: who competes, who has lost already, and why; and when none is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_kernels import FakeTactic, compile_nothing

from tapeout.compiler import cuda_plan
from tapeout.compiler.build_pack import build_pack
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.tactics import gpu_pack
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings
from tapeout.compiler.tactics.gpu_contests import contests
from tapeout.compiler.tactics.gpu_decide import open_contests
from tapeout.compiler.tactics.gpu_pack import make_pack, write_pack
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import CudaTarget
from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.tactic_timer.pack_file import PackFile, encode_pack, read_pack

LIMITS = Limits(max_batch_size=2, max_num_tokens=2, max_seq_len=64, tokens_per_page=16)
TARGET = CudaTarget(90, 132, 232448, 16)
ADD = OpSignature("add", (TensorType("float32", ("T", 16)),) * 2, (), (TensorType("float32", ("T", 16)),))
GPU = Gpu("NVIDIA H200", 90, 132, 140)
OPTIONS = BuildOptions(target="cuda:h200")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pack, "compile_all", compile_nothing)
    monkeypatch.setattr(gpu_pack, "compile_kernel", lambda spec, sm: compile_nothing([spec], sm)[0])


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PackFile]:
    """A pack of ADD with these tactics; the first is the reference."""

    def make(*tactics: FakeTactic) -> PackFile:
        monkeypatch.setattr(cuda_plan, "cuda_tactics", lambda op: tactics)
        return make_pack(contests({ADD.key(): ADD}, LIMITS, TARGET), LIMITS, TARGET, "cuda:h200")

    return make


def test_a_pack_holds_each_kernel_once(pack: Callable[..., PackFile]) -> None:
    file = pack(FakeTactic("plain", 3), FakeTactic("fast", 1), FakeTactic("same", 2, NAME="fast"))
    assert [e.rows for e in file.pack.entries] == [1, 2]
    for entry in file.pack.entries:
        assert entry.reference.tactic == "plain"
        # `same` comes to the same kernel as `fast`, which stands for both.
        assert [c.tactic for c in entry.candidates] == ["fast", "plain"]
        assert [c.reason for c in entry.candidates] == ["", ""]
        assert entry.samples
    blobs = {kernel.blob for kernel in file.pack.kernels}
    assert blobs == set(file.cubins)
    assert len(file.pack.kernels) == 2 + len(file.pack.tools)
    generic = ("fill_normal", "fill_cache", "compare", "compare_cache")
    named = {*(f"{name}.float32" for name in generic), "fill_integers", "compare.int32"}
    assert set(file.pack.tools) == named


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        ({"SHARED": 232449}, "fill_integers takes 232449 bytes of shared memory a block, sm_90 has 232448"),
        ({"BROKEN": True}, "compiling fill_integers failed: no such instruction"),
    ],
)
def test_what_cannot_run_has_lost_already(
    pack: Callable[..., PackFile], fact: dict[str, Any], reason: str
) -> None:
    file = pack(FakeTactic("plain", 3), FakeTactic("bad", 1, **fact))
    for entry in file.pack.entries:
        bad, plain = entry.candidates
        assert (bad.tactic, bad.reason, bad.launches.launches) == ("bad", reason, ())
        assert (plain.tactic, plain.reason) == ("plain", "")
    assert len(file.pack.kernels) == 1 + len(file.pack.tools)  # its cubin is not carried along
    with pytest.raises(TapeoutError, match=rf"the reference of add.* cannot run on sm_90: {reason}"):
        pack(FakeTactic("bad", 1, **fact), FakeTactic("plain", 3))


@pytest.mark.parametrize("broken", [False, True])
def test_kernels_are_counted_as_they_come(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """Also when one does not compile, and all are asked for one by one."""
    tactics = [FakeTactic("plain", 3), FakeTactic("other", 1, **({"BROKEN": True} if broken else {}))]
    monkeypatch.setattr(cuda_plan, "cuda_tactics", lambda op: tactics)
    told: list[str] = []
    file = make_pack(contests({ADD.key(): ADD}, LIMITS, TARGET), LIMITS, TARGET, "cuda:h200", told.append)
    count = len(file.pack.kernels) + broken
    tail = [t for t in told if t.endswith(f" of {count} kernels compiled")]
    last = count - 1 if broken else count
    assert tail[-count:] == [f"{n} of {count} kernels compiled" for n in range(last - count + 1, last + 1)]


def test_the_same_contests_give_the_same_bytes(pack: Callable[..., PackFile], tmp_path: Path) -> None:
    tactics = (FakeTactic("plain"), FakeTactic("fast"))
    path = tmp_path / "a.pack"
    path.write_bytes(b"an older pack")
    size = write_pack(pack(*tactics), path)
    assert path.read_bytes() == encode_pack(pack(*tactics))
    assert size == path.stat().st_size
    assert read_pack(path).pack == pack(*tactics).pack
    assert [p.name for p in tmp_path.iterdir()] == ["a.pack"]


def test_what_the_cache_answers_is_left_out(
    pack: Callable[..., PackFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(FakeTactic("plain"), FakeTactic("fast"))
    cache = TimingCache(None)
    timings = GpuTimings(cache, GPU)

    def left() -> list[int]:
        open_ = open_contests({"add": ADD}, (), LIMITS, TARGET, "cuda:h200", OPTIONS, cache)
        return [c.rows for c in open_.contests]

    assert left() == [1, 2]
    for contest in contests({"add": ADD}, LIMITS, TARGET)[:1]:
        for c in contest.contenders:
            place = (contest.key, contest.kind, contest.conditions, contest.rows)
            timings.put(*place, c.kernel_hash, c.name, Outcome(1.0))
    assert left() == [2]


def test_refusals_before_anything_is_done(models: ModuleType, tmp_path: Path) -> None:
    checkpoint = models.make_tiny("llama", tmp_path / "model")
    cache = tmp_path / "cache.json"
    cache.write_text('{"version": 1, "entries": {}}')
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def refused(**options: Any) -> str:
        with pytest.raises(UsageError) as caught:
            build_pack(str(checkpoint), BuildOptions(**{"target": "cuda:h200", **options}))
        assert caught.value.hint is not None
        return caught.value.message

    pack = tmp_path / "m.pack"
    assert "timed while building" in refused(target="cpu", pack=pack)
    assert "no pack is named" in refused()
    assert "expected an existing directory" in refused(pack=tmp_path / "gone" / "m.pack")
    assert "is also an input of the build" in refused(pack=checkpoint / "config.json")
    assert "is also the pack" in refused(pack=cache, timing_cache=cache)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert "pack" not in BuildOptions(target="cuda:h200", pack=pack).identity()
