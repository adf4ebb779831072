"""Segments beside a timing cache: by their bytes, whole, and when its timings go into another one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tapeout.compiler.tensorrt.builder import Built
from tapeout.compiler.tensorrt.segment_cache import SegmentCache, kept_folder, take_over
from tapeout.plugins.errors import UsageError


def beside(timings: Path) -> SegmentCache:
    return SegmentCache(kept_folder(timings), "tensorrt_rtx", "1.7.1", 89)


def put(timings: Path, model: bytes, plan: bytes) -> None:
    beside(timings).put(model, (), Built(plan, ("a layer",), 1.0))


def plans(timings: Path, *models: bytes) -> list[bytes | None]:
    found = [beside(timings).get(model, ()) for model in models]
    return [built and built.plan for built in found]


def wanted(timings: Path, model: bytes, *plans: bytes) -> bytes | None:
    """What answers where the segments of these bytes are wanted, the first most."""
    built = beside(timings).get(model, (), [hashlib.sha256(plan).hexdigest() for plan in plans])
    return built and built.plan


def leftover(timings: Path) -> Path:
    """A file of a process that was killed while it wrote."""
    path = kept_folder(timings) / ".0123-4567.plan.89ab.tmp"
    path.write_bytes(b"half")
    return path


#: A description whose seconds no float holds.
TOO_LONG = '{"sha256": "DIGEST", "layers": [], "seconds": 1%s}' % ("0" * 400)


def test_what_was_built_twice_is_kept_twice(tmp_path: Path) -> None:
    """As for two packs, which are timed on GPUs of one compute capability: times belong to bytes."""
    timings = tmp_path / "times.json"
    l4, l40s = b"timed on an L4", b"timed on an L40S"
    put(timings, b"one", l4)
    put(timings, b"one", l40s)
    for plan, other in ((l4, l40s), (l40s, l4)):
        assert wanted(timings, b"one", b"gone", plan) == wanted(timings, b"one", plan, other) == plan
    assert wanted(timings, b"one") == wanted(timings, b"one", b"gone") is not None


def test_a_damaged_segment_does_not_answer(tmp_path: Path) -> None:
    timings = tmp_path / "times.json"
    put(timings, b"one", b"plan")
    (path,) = kept_folder(timings).glob("*.plan")
    path.write_bytes(b"plam")
    assert plans(timings, b"one") == [None]
    put(timings, b"one", b"plan")
    assert plans(timings, b"one") == [b"plan"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 200_000, '{"sha256": "DIGEST", "layers": 3}', TOO_LONG]
)
def test_a_damaged_description_does_not_answer(tmp_path: Path, text: str) -> None:
    timings = tmp_path / "times.json"
    put(timings, b"one", b"plan")
    (path,) = kept_folder(timings).glob("*.json")
    path.write_text(text.replace("DIGEST", hashlib.sha256(b"plan").hexdigest()))
    assert plans(timings, b"one") == [None]
    put(timings, b"one", b"plan")
    assert plans(timings, b"one") == [b"plan"]


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    earlier, new = tmp_path / "earlier.json", tmp_path / "new.json"
    for timings in (earlier, new):
        put(timings, b"one", b"plan")
    left = leftover(new)
    put(new, b"two", b"plan of two")
    assert not left.exists()
    left = leftover(new)
    take_over(earlier, new)
    assert not left.exists()
    assert sorted(path.suffix for path in kept_folder(new).iterdir()) == [".json"] * 2 + [".plan"] * 2


def test_earlier_segments_are_taken_over_and_newer_ones_stay(tmp_path: Path) -> None:
    earlier, new = tmp_path / "earlier.json", tmp_path / "new.json"
    put(earlier, b"one", b"old plan of one")
    put(earlier, b"two", b"plan of two")
    put(new, b"one", b"new plan of one")
    take_over(earlier, new)
    take_over(earlier, new)
    assert plans(new, b"two", b"three") == [b"plan of two", None]
    for plan in (b"new plan of one", b"old plan of one"):
        assert wanted(new, b"one", plan) == plan
    assert plans(earlier, b"one", b"two") == [b"old plan of one", b"plan of two"]


def test_a_pair_is_taken_over_or_nothing(tmp_path: Path) -> None:
    """A plan that lost its description, or its bytes, is made good; one that is bad there stays there."""
    earlier, new = tmp_path / "earlier.json", tmp_path / "new.json"
    for timings in (earlier, new):
        put(timings, b"one", b"plan of one")
        put(timings, b"two", b"plan of two")
        put(timings, b"three", b"plan of three")
    ((one, bad), (two, _), (three, _)) = (
        [next(kept_folder(t).glob(f"{beside(t).key(model, ())}-*.plan")) for t in (new, earlier)]
        for model in (b"one", b"two", b"three")
    )
    one.unlink()
    bad.write_bytes(b"damaged")
    two.write_bytes(b"damaged")
    three.with_suffix(".json").unlink()
    take_over(earlier, new)
    assert plans(new, b"one", b"two", b"three") == [None, b"plan of two", b"plan of three"]
    assert not one.exists()


def test_a_cache_without_segments_gives_none(tmp_path: Path) -> None:
    take_over(tmp_path / "earlier.json", tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_takes_none_is_named(tmp_path: Path) -> None:
    put(tmp_path / "earlier.json", b"one", b"plan")
    kept_folder(tmp_path / "new.json").write_text("in the way")
    with pytest.raises(UsageError, match=r"earlier\.json\.segments cannot be put into .*new\.json\.segments"):
        take_over(tmp_path / "earlier.json", tmp_path / "new.json")
