"""Segments beside a timing cache, when its timings go into another one."""

from __future__ import annotations

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


def test_earlier_segments_are_taken_over_and_newer_ones_stay(tmp_path: Path) -> None:
    earlier, new = tmp_path / "earlier.json", tmp_path / "new.json"
    put(earlier, b"one", b"old plan of one")
    put(earlier, b"two", b"plan of two")
    put(new, b"one", b"new plan of one")
    take_over(earlier, new)
    take_over(earlier, new)
    assert plans(new, b"one", b"two", b"three") == [b"new plan of one", b"plan of two", None]
    assert plans(earlier, b"one", b"two") == [b"old plan of one", b"plan of two"]


def test_a_cache_without_segments_gives_none(tmp_path: Path) -> None:
    take_over(tmp_path / "earlier.json", tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_takes_none_is_named(tmp_path: Path) -> None:
    put(tmp_path / "earlier.json", b"one", b"plan")
    kept_folder(tmp_path / "new.json").write_text("in the way")
    with pytest.raises(UsageError, match=r"earlier\.json\.segments cannot be put into .*new\.json\.segments"):
        take_over(tmp_path / "earlier.json", tmp_path / "new.json")
